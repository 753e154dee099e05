"""A tiny policy by imitation: a scripted player plays an environment, and a small random model
learns to write as it does.

Supervised fine-tuning is a loss like any other (`SFTLoss`); what is special is where the rows come
from. The result is a policy that knows the form of the task and plays it badly: one that
reinforcement learning can improve within minutes on a CPU."""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlflow.algorithms import SFTLoss
from rlflow.batching import make_batch
from rlflow.environment import Environment, awaited
from rlflow.errors import ConfigError, EnvironmentContractError, described
from rlflow.models.tiny import write_random_model, write_tokenizer
from rlflow.models.weight_files import write_model
from rlflow.rollout.environment_calls import tasks_of
from rlflow.rollout.tokenizer import Tokenizer
from rlflow.trainer.base import Trainer
from rlflow.types import Batch, Segment, Step, StopReason, Task, Trajectory

Encode = Callable[[str], list[int]]
TextPart = tuple[str, bool]
"""A text and whether the policy would have written it."""
Player = Callable[[str, Sequence[tuple[str, str]], random.Random, bool], str]
"""(prompt, [(response, observation)] so far, generator, clumsy) -> the next response. It plays
well, or clumsily if told so."""
VOCABULARY = 512
TEXTS = 400  # episodes that the tokenizer learns from
REPEATED_WEIGHT = 0.5


@dataclass(frozen=True)
class Lessons:
    """How the imitation is taught: optimizer steps of so many episodes each. turns: of an episode
    at the most. clumsy: share of the steps after which the player plays clumsily, which spoils the
    behaviour of the policy and not the skill it has by then."""

    steps: int = 300
    rows: int = 32
    lr: float = 3e-3
    turns: int = 6
    clumsy: float = 0.65
    seed: int = 0
    backend: str = "megatron"


@dataclass(frozen=True)
class PlayedEpisode:
    """An episode that a player played: its parts in order, and its return."""

    parts: tuple[TextPart, ...]
    reward: float


def demonstrate(
    environment: Environment,
    player: Player,
    tasks: Sequence[Task],
    turns: int,
    seed: str,
    clumsy: bool = False,
) -> list[PlayedEpisode]:
    """One episode of each task, played by the player; its randomness comes from the seed and the
    place of the task.

    Raises ConfigError for a player that fails or writes no text, or a prompt that is no text;
    EnvironmentContractError as a run."""
    play = _demonstrate_all(environment, _Seat(player, turns, clumsy), tasks, seed)
    with ThreadPoolExecutor(1) as thread:  # a notebook has a running loop in this one
        return thread.submit(asyncio.run, play).result()


@dataclass(frozen=True)
class _Seat:
    """Who plays, how, and for how many turns."""

    player: Player
    turns: int
    clumsy: bool

    def play(self, prompt: str, said: Sequence[tuple[str, str]], generator: random.Random) -> str:
        try:
            response = self.player(prompt, list(said), generator, self.clumsy)
        except Exception as failure:
            raise ConfigError(
                f"the player failed after {len(said)} turns: {described(failure)}"
            ) from failure
        if not isinstance(response, str) or not response:
            raise ConfigError(f"the player: expected the text of a response, found {response!r}.")
        return response


async def _demonstrate_all(
    environment: Environment, seat: _Seat, tasks: Sequence[Task], seed: str
) -> list[PlayedEpisode]:
    return [
        await _demonstrate(environment, seat, task, random.Random(f"{seed}/{number}"))
        for number, task in enumerate(tasks)
    ]


async def _demonstrate(
    environment: Environment, seat: _Seat, task: Task, generator: random.Random
) -> PlayedEpisode:
    episode = await awaited(environment.reset(task))
    prompt = episode.task.prompt
    if not isinstance(prompt, str):
        raise ConfigError(
            f"task '{task.id}': a tiny policy reads text, found a prompt of messages; give the environment a text prompt."
        )
    parts: list[TextPart] = [(prompt, False)]
    said: list[tuple[str, str]] = []
    reward = 0.0
    try:
        for turn in range(1, seat.turns + 1):
            response = seat.play(prompt, said, generator)
            episode.turns, episode.turns_left = turn, seat.turns - turn
            step = await awaited(environment.step(episode, response))
            if not isinstance(step, Step):
                raise EnvironmentContractError(
                    f"step: expected an rlflow.Step, found {type(step).__name__}."
                )
            parts.append((response, True))
            reward += step.reward
            if step.terminated or turn == seat.turns:
                break
            if not isinstance(step.observation, str):
                raise ConfigError(
                    f"task '{task.id}': a tiny policy reads text, found an observation of messages."
                )
            parts.append((step.observation, False))
            said.append((response, step.observation))
    finally:
        await awaited(environment.close(episode))
    return PlayedEpisode(tuple(parts), reward)


def to_trajectory(
    parts: Sequence[TextPart],
    encode: Encode,
    encode_response: Encode | None = None,
    repeats: bool = False,
) -> Trajectory:
    """The parts as a trajectory without log-probs, tokenized part by part, as a rollout is; what
    the policy wrote by `encode_response` where it is given.

    repeats: beside the policy's own text it trains what the row has said before (the second token
    of a repeated pair), which is what can be predicted of prose about unknown names; such tokens
    have version -1."""
    pieces = [
        ((encode_response or encode)(text) if sampled else encode(text), sampled)
        for text, sampled in parts
    ]
    tokens = [token for ids, _ in pieces for token in ids]
    sampled = torch.tensor([flag for ids, flag in pieces for _ in ids])
    trained = sampled | torch.tensor(_repeated(tokens)) if repeats else sampled
    segment = Segment(torch.tensor(tokens), trained, None, torch.where(sampled, 0, -1))
    return Trajectory("demonstration", "demonstration", [segment], [], 0.0, StopReason.TERMINATED)


def _repeated(tokens: Sequence[int]) -> list[bool]:
    """For each token whether it was there before, behind the same one."""
    pairs: set[tuple[int, int]] = set()
    found = [False]
    for pair in itertools.pairwise(tokens):
        found.append(pair in pairs)
        pairs.add(pair)
    return found


def row_weights(batch: Batch) -> Tensor:
    """(B, T) token weights that sum to 1, those outside the policy's own text counting half."""
    shares = batch.loss_mask * torch.where(
        batch.require("versions", "imitation") < 0, REPEATED_WEIGHT, 1.0
    )
    return shares / shares.sum()


def make_policy(
    environment: Environment,
    player: Player,
    out: str | Path,
    lessons: Lessons = Lessons(),
    *,
    overwrite: bool = False,
    say: Callable[[int, float], object] = lambda step, loss: None,
) -> float:
    """Writes a HuggingFace directory with a tiny policy that writes as the player does in this
    environment; returns the mean return of the clumsy player. say: told (steps done, loss in nats
    per token) after each step.

    Raises what `demonstrate` raises, StorageError where `out` is taken."""
    tasks, stop = tasks_of(environment, "train"), tuple(environment.stop)
    if not tasks:
        raise ConfigError("the environment has no tasks of the split 'train' to demonstrate.")
    drawn, place = [tasks[index % len(tasks)] for index in range(TEXTS)], f"{lessons.seed}/texts"
    clumsy = demonstrate(environment, player, drawn, lessons.turns, place, clumsy=True)
    shown = [*demonstrate(environment, player, drawn, lessons.turns, place), *clumsy]
    with tempfile.TemporaryDirectory(prefix="rlflow-") as folder:
        write_tokenizer(
            folder, ["".join(text for text, _ in one.parts) for one in shown], vocabulary=VOCABULARY
        )
        write_random_model(
            folder, hidden=64, layers=2, heads=4, kv_heads=2, ffn=160, seed=lessons.seed
        )
        tokenizer = Tokenizer.from_pretrained(folder)

        # One that no stop string ends is ended by its last token
        def encode_response(text: str) -> list[int]:
            return tokenizer.encode(text) + (
                [] if text.endswith(stop) and stop else list(tokenizer.eos_ids[:1])
            )

        schedule = {
            "name": "cosine",
            "warmup_steps": lessons.steps // 20,
            "decay_steps": lessons.steps,
            "min_lr": 0.2 * lessons.lr,
        }
        trainer = Trainer.from_pretrained(
            folder, lessons.backend, lr=lessons.lr, schedule=schedule, seed=lessons.seed
        )
        try:
            for step in range(lessons.steps):
                generator = random.Random(f"{lessons.seed}/{step}")
                chosen = [generator.choice(tasks) for _ in range(lessons.rows)]
                spoilt = step >= lessons.clumsy * lessons.steps
                played = demonstrate(
                    environment, player, chosen, lessons.turns, f"{lessons.seed}/{step}", spoilt
                )
                batch = make_batch(
                    [to_trajectory(one.parts, tokenizer.encode, encode_response) for one in played]
                )
                metrics = trainer.update(batch.replace(weights=row_weights(batch)), SFTLoss())
                say(step + 1, metrics["loss"])
            write_model(out, trainer.weights(), reference=folder, overwrite=overwrite)
        finally:
            trainer.close()
    return sum(one.reward for one in clumsy) / len(clumsy)
