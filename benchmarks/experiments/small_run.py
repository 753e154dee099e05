"""What the experiments in several turns share, on top of `tiny`: environments with a token per character, a start that knows
which responses there are, and steps that a caller may interleave."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.tiny import Tiny, tiny
from rlflow import Environment, Episode, Step, Task
from rlflow.algorithms.aggregates.means import token_mean
from rlflow.algorithms.losses.sft import SFTLoss
from rlflow.batching import make_batch
from rlflow.loop import training_step
from rlflow.report.reductions import rollout_metrics
from rlflow.report.timer import PhaseTimer
from rlflow.rollout import Tokenizer
from rlflow.run.export import export_policy
from rlflow.types import Group, Segment, StopReason, Trajectory, Turn

SPECIAL = ("<pad>", "<end>")
VALUES = (
    "trainer.lr=5e-3",
    "rollout.max_response_tokens=1",
    "rollout.max_total_tokens=256",
    "rollout.prompts_per_step=8",
)
CRITIC = "algorithm.critic={lr: 5e-3}"
"""For presets with a critic, whose own rate is one of large models."""

Weights = Iterable[tuple[str, Tensor]]
Act = Callable[[str, random.Random], str]
"""(the last thing that the environment said, a generator) -> a response."""


class SmallTask(Environment):
    """An environment that answers at once. `characters`: all that can be said, a token each; each of them ends a response."""

    characters: str = ""

    def __init__(self) -> None:
        self.stop = tuple(self.characters)

    @abstractmethod
    def answer(self, episode: Episode, response: str) -> Step:
        """What `step` gives."""

    async def step(self, episode: Episode, response: str) -> Step:
        return self.answer(episode, response)


def write_policy(path: Path, characters: str, seed: int, width: int = 32) -> None:
    """A random Qwen2 model of some 25,000 parameters with a token per character."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    words = [*SPECIAL, *dict.fromkeys(characters)]
    inner = Fast(models.BPE({word: number for number, word in enumerate(words)}, []))
    inner.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<end>"
    ).save_pretrained(str(path))
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(words), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.08, bos_token_id=None, pad_token_id=0,
        eos_token_id=1,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(str(path))


class SmallRun:
    """A run whose policy is warmed up before it begins. `sampled`: the groups of the last step, before any filter. as_sampled:
    what the engine gets in place of the trainer's weights, for a policy that differs from the one that is trained."""

    def __init__(
        self, made: Tiny, as_sampled: Callable[[Weights, int], Weights] | None = None
    ) -> None:
        self.rollout, self.trainer, self.algorithm, self.source = (
            made.rollout,
            made.trainer,
            made.algorithm,
            made.source,
        )
        self._prompts, self._model = made.config.rollout.prompts_per_step, made.config.model.path
        self._as_sampled = as_sampled or (lambda weights, version: weights)
        self._stream: Iterator[list[Group]] | None = None
        self.sampled: list[Group] = []
        self.steps = 0

    @property
    def tokenizer(self) -> Tokenizer:
        return self.rollout.tokenizer

    def warm_up(self, trajectories: Sequence[Trajectory], updates: int) -> None:
        """Raises the likelihood of what these say, all of them in each update."""
        batch = make_batch(trajectories)
        batch = batch.replace(weights=token_mean(batch))
        for _ in range(updates):
            self.trainer.update(batch, SFTLoss())

    def begin(self) -> None:
        """Training starts from the policy as it is now: the reference, and what the engine samples from."""
        if "reference" in self.algorithm.needs:
            self.trainer.snapshot("reference")
        self.sync()
        rounds = self.algorithm.max_rounds
        self._stream = self.rollout.stream(
            self.source, self._prompts, admit=self._admit, max_rounds=rounds
        )

    def sync(self) -> None:
        """Gives the engine the trainer's weights."""
        self.rollout.load_weights(self._as_sampled(self.trainer.weights(), self.steps), self.steps)

    def export(self, path: Path) -> None:
        """Writes today's policy as a HuggingFace directory."""
        export_policy(self.trainer, path, self._model, "float32")

    def step(self) -> dict[str, float]:
        """Samples, trains, and gives the engine the new weights; returns the step's metrics."""
        if self._stream is None:
            self.begin()
        assert self._stream is not None
        self.sampled.clear()
        groups = self.algorithm.complete(next(self._stream))
        metrics = self.train(groups)
        trajectories = [one for group in self.sampled for one in group.trajectories]
        metrics |= rollout_metrics(trajectories, self.rollout.environment.metrics)
        return {**metrics, **self.rollout.report, **self.algorithm.report()}

    def train(self, groups: Sequence[Group]) -> dict[str, float]:
        """The updates on these groups, and the weights to the engine."""
        metrics = training_step(self.steps, groups, self.trainer, self.algorithm, PhaseTimer())
        self.steps += 1
        self.sync()
        return metrics

    def _admit(self, groups: list[Group]) -> list[Group]:
        self.source.observe(groups)
        self.sampled += groups
        return self.algorithm.admit(groups)


@contextmanager
def small_run(
    seed: int,
    environment: Mapping[str, Any],
    characters: str,
    *overrides: str,
    preset: str | None = None,
    as_sampled: Callable[[Weights, int], Weights] | None = None,
    model: Callable[[Path], None] | None = None,
) -> Iterator[SmallRun]:
    """A run of an environment (a component) with a policy that has a token for each of its characters. model: writes the
    directory that it begins with; None: random weights."""
    values = (*VALUES, *overrides)

    def written(path: Path) -> None:
        write_policy(path, characters, seed)

    with tiny(
        seed, *values, preset=preset, environment=environment, model=model or written
    ) as made:
        yield SmallRun(made, as_sampled)


def demonstration(
    tokenizer: Tokenizer, task: SmallTask, problem: Task, act: Act, draw: random.Random, turns: int
) -> Trajectory:
    """What `act` does in the task, in so many turns at the most, as a trajectory without log-probs."""
    episode, seen = Episode(problem), str(problem.prompt)
    tokens = tokenizer.encode(seen)
    mask, said, stop = [False] * len(tokens), list[Turn](), StopReason.MAX_TURNS
    for _ in range(turns):
        response = act(seen, draw)
        words = tokenizer.encode(response)
        episode.turns += 1
        step = task.answer(episode, response)
        seen = str(step.observation)
        said.append(
            Turn(0, len(tokens), len(tokens) + len(words), step.reward, 0.0, response, seen)
        )
        tokens, mask = tokens + words, mask + [True] * len(words)
        if step.terminated:
            stop = StopReason.TERMINATED
            break
        heard = tokenizer.encode_text(seen)
        tokens, mask = tokens + heard, mask + [False] * len(heard)
    segment = Segment(
        torch.tensor(tokens), torch.tensor(mask), None, torch.full((len(tokens),), -1)
    )
    name, reward = f"demonstration:{problem.id}", sum(turn.reward for turn in said)
    return Trajectory(
        problem.id,
        name,
        [segment],
        said,
        reward,
        stop,
        source="demonstration",
        prompt=str(problem.prompt),
        id=name,
    )


def some_demonstrations(
    small: SmallRun, task: SmallTask, act: Act, seed: int, turns: int, count: int = 96
) -> list[Trajectory]:
    """What `act` does in random training tasks."""
    draw, problems = random.Random(seed), task.tasks("train")
    return [
        demonstration(small.tokenizer, task, draw.choice(problems), act, draw, turns)
        for _ in range(count)
    ]
