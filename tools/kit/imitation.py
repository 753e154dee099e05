"""A tiny policy by imitation: a small random model learns, by the loss `SFTLoss`, to write as a
scripted player of an environment does. It knows the form of the task and plays it badly:
reinforcement learning can improve it within minutes on a CPU."""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rlflow.algorithms import SFTLoss
from rlflow.batching import make_batch
from rlflow.environment import Environment, answered, awaited, check_fields, note_response
from rlflow.errors import ConfigError, StorageError, described
from rlflow.models.huggingface import why_occupied
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
"""(prompt, [(response, observation)] so far, generator, clumsy) -> the next response."""
VOCABULARY = 512
TEXTS = 400  # episodes that the tokenizer learns from
AT_ONCE = 8  # episodes, where the environment waits for something
REPEATED_WEIGHT = 0.5
_READS_TEXT = "task '{}': a tiny policy reads text, found"


@dataclass(frozen=True)
class Lessons:
    """The imitation: optimizer steps of `rows` episodes of at most `turns` each. clumsy: share of
    the steps after which the player plays clumsily, which spoils behaviour, not skill. family: of
    the model, one of `rlflow.models.tiny`'s. episodes: of each manner that are played, and learned
    from again and again; None: new ones for every step."""

    steps: int = 300
    rows: int = 32
    lr: float = 3e-3
    turns: int = 6
    clumsy: float = 0.65
    seed: int = 0
    backend: str = "megatron"
    family: str = "qwen2"
    episodes: int | None = None


@dataclass(frozen=True)
class PlayedEpisode:
    """An episode that a player played: its parts in order, its return, and the stop strings of its
    responses."""

    parts: tuple[TextPart, ...]
    reward: float
    stop: tuple[str, ...] = ()


def demonstrate(
    environment: Environment,
    player: Player,
    tasks: Sequence[Task],
    turns: int,
    seed: str,
    clumsy: bool = False,
) -> list[PlayedEpisode]:
    """One episode of each task by the player, seeded by the seed and the task's place.

    Raises ConfigError for a player that fails or writes no text, or a prompt that is no text;
    EnvironmentContractError as a run."""

    async def play() -> list[PlayedEpisode]:
        room = asyncio.Semaphore(AT_ONCE)

        async def one(number: int, task: Task) -> PlayedEpisode:
            async with room:
                generator = random.Random(f"{seed}/{number}")
                return await _demonstrate(environment, answer, task, turns, generator)

        return await asyncio.gather(*map(one, range(len(tasks)), tasks))

    answer = partial(_answer, player, clumsy)
    with ThreadPoolExecutor(1) as thread:  # a notebook has a running loop in this one
        return thread.submit(asyncio.run, play()).result()


def _answer(
    player: Player,
    clumsy: bool,
    prompt: str,
    said: Sequence[tuple[str, str]],
    generator: random.Random,
) -> str:
    """The player's next response."""
    try:
        response = player(prompt, list(said), generator, clumsy)
    except Exception as failure:
        raise ConfigError(
            f"the player failed after {len(said)} turns: {described(failure)}"
        ) from failure
    if not isinstance(response, str) or not response:
        raise ConfigError(f"the player: expected the text of a response, found {response!r}.")
    return response


async def _demonstrate(
    environment: Environment,
    answer: Callable[[str, Sequence[tuple[str, str]], random.Random], str],
    task: Task,
    turns: int,
    generator: random.Random,
) -> PlayedEpisode:
    episode = await awaited(environment.reset(task))
    prompt = episode.task.prompt
    if not isinstance(prompt, str):
        raise ConfigError(f"{_READS_TEXT.format(task.id)} a prompt of messages.")
    parts: list[TextPart] = [(prompt, False)]
    said: list[tuple[str, str]] = []
    reward = 0.0
    stop = _stops(environment, episode.opening)
    try:
        for turn in range(1, turns + 1):
            response = answer(prompt, said, generator)
            note_response(episode, response, turns)
            step = await answered(environment, episode, response, {})
            check_fields(environment, "step", step)
            parts.append((response, True))
            reward += step.reward
            if step.terminated or turn == turns:
                break
            if not isinstance(step.observation, str):
                raise ConfigError(f"{_READS_TEXT.format(task.id)} an observation of messages.")
            parts.append((step.observation, False))
            said.append((response, step.observation))
            stop |= _stops(environment, step)
    finally:
        await awaited(environment.close(episode))
    return PlayedEpisode(tuple(parts), reward, tuple(sorted(stop)))


def _stops(environment: Environment, step: Step | None) -> set[str]:
    """The stop strings of the response that follows."""
    own = None if step is None else step.stop
    return set(environment.stop if own is None else own)


def to_trajectory(
    parts: Sequence[TextPart],
    encode: Encode,
    encode_response: Encode | None = None,
    repeats: bool = False,
) -> Trajectory:
    """The parts as a trajectory without log-probs, tokenized part by part, as a rollout is; the
    policy's by `encode_response`, if given.

    repeats: also trains the second token of each pair that the row holds before, which is what can
    be predicted of prose about unknown names; such tokens have version -1."""
    encoders = {False: encode, True: encode_response or encode}
    pieces = [(encoders[sampled](text), sampled) for text, sampled in parts]
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
    repeated = batch.require("versions", "imitation") < 0
    shares = batch.loss_mask * torch.where(repeated, REPEATED_WEIGHT, 1.0)
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
    """Writes a HuggingFace directory with a tiny policy that imitates the player; returns the mean
    return of the clumsy player. say: called with (steps done, loss in nats per token).

    Raises as `demonstrate`, and StorageError where `out` is taken."""
    out = Path(out)
    _check_place(out, overwrite)
    tasks = tasks_of(environment, "train")
    if not tasks:
        raise ConfigError("the environment has no tasks of the split 'train' to demonstrate.")
    drawn = [tasks[index % len(tasks)] for index in range(lessons.episodes or TEXTS)]
    place = f"{lessons.seed}/texts"
    clumsy = demonstrate(environment, player, drawn, lessons.turns, place, clumsy=True)
    careful = demonstrate(environment, player, drawn, lessons.turns, place)
    texts = ["".join(text for text, _ in one.parts) for one in [*careful, *clumsy]]
    with tempfile.TemporaryDirectory(prefix="rlflow-") as folder:
        write_tokenizer(folder, texts, vocabulary=VOCABULARY)
        sizes = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 160}
        write_random_model(folder, **sizes, seed=lessons.seed, family=lessons.family)
        tokenizer = Tokenizer.from_pretrained(folder)

        # One that no stop string ends is ended by its last token
        def encode_response(stop: tuple[str, ...], text: str) -> list[int]:
            ids = tokenizer.encode(text)
            return ids if stop and text.endswith(stop) else [*ids, *tokenizer.eos_ids[:1]]

        def batch_of(step: int) -> Batch:
            place = f"{lessons.seed}/{step}"
            generator = random.Random(place)
            spoilt = step >= lessons.clumsy * lessons.steps
            if lessons.episodes is not None:
                played = generator.choices(clumsy if spoilt else careful, k=lessons.rows)
            else:
                chosen = [generator.choice(tasks) for _ in range(lessons.rows)]
                played = demonstrate(environment, player, chosen, lessons.turns, place, spoilt)
            return make_batch(
                [
                    to_trajectory(one.parts, tokenizer.encode, partial(encode_response, one.stop))
                    for one in played
                ]
            )

        _teach(folder, out, lessons, batch_of, say, overwrite)
    return sum(one.reward for one in clumsy) / len(clumsy)


def _check_place(out: Path, overwrite: bool) -> None:
    """Raises StorageError, before the work, where a model may or can not be written."""
    if (reason := why_occupied(out, overwrite)) is not None:
        raise StorageError(reason)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out.parent).close()
    except OSError as error:
        raise StorageError(f"{out}: cannot be written ({error.strerror}).") from error


def _teach(
    folder: str,
    out: Path,
    lessons: Lessons,
    batch_of: Callable[[int], Batch],
    say: Callable[[int, float], object],
    overwrite: bool,
) -> None:
    """Trains the model of the folder on the batches of all steps, and writes it."""
    schedule = {
        "name": "cosine",
        "warmup_steps": lessons.steps // 20,
        "decay_steps": lessons.steps,
        "min_lr": 0.2 * lessons.lr,
    }
    trainer = Trainer.from_pretrained(
        folder,
        lessons.backend,
        lr=lessons.lr,
        schedule=schedule,
        seed=lessons.seed,
    )
    try:
        for step in range(lessons.steps):
            batch = batch_of(step)
            metrics = trainer.update(batch.replace(weights=row_weights(batch)), SFTLoss())
            say(step + 1, metrics["loss"])
        write_model(out, trainer.weights(), reference=folder, overwrite=overwrite)
    finally:
        trainer.close()
