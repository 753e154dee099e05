"""A training that is small enough for a cell of a table: rlflow's own parts, put together from a configuration, step by step.

The policy is a random Qwen2 model of some 30,000 parameters with a token per character, sampled by the embedded engine and
trained by the reference trainer.
"""

from __future__ import annotations

import random
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlflow import Environment, Episode, Step, Task
from rlflow.algorithms.aggregates.means import token_mean
from rlflow.algorithms.losses.sft import SFTLoss
from rlflow.batching import make_batch
from rlflow.components import CURATOR
from rlflow.config.schema import load_config
from rlflow.loop import training_step
from rlflow.metrics.reductions import rollout_metrics
from rlflow.metrics.timer import PhaseTimer
from rlflow.rollout import Tokenizer
from rlflow.run.algorithm import Algorithm
from rlflow.run.assemble import make_rollout, make_trainer
from rlflow.types import Group, Segment, StopReason, Trajectory, Turn

SPECIAL = ("<pad>", "<end>")
VALUES = (
    "run.deterministic=true",
    "trainer.backend=reference",
    "trainer.lr=5e-3",
    "trainer.optimizer={name: adamw, weight_decay: 0, beta2: 0.99}",
    "rollout.max_response_tokens=1",
    "rollout.max_total_tokens=256",
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=8",
)
"""Of every small run, unless it says otherwise."""
SENT_LR = {"critic": "algorithm.critic={lr: 5e-3}"}
"""Overrides for presets whose rates are those of large models."""

Weights = Iterator[tuple[str, Tensor]]
Act = Callable[[str, random.Random], str]
"""(the last thing that the environment said, a generator) -> a response."""


class SmallTask(Environment):
    """An environment that answers at once. `characters`: all that can be said; each of them ends a response."""

    characters: str = ""

    def __init__(self) -> None:
        self.stop = tuple(self.characters)

    @abstractmethod
    def answer(self, episode: Episode, response: str) -> Step:
        """What `step` gives."""

    async def step(self, episode: Episode, response: str) -> Step:
        return self.answer(episode, response)


def write_policy(path: Path, characters: str, seed: int, width: int = 48) -> Path:
    """A random Qwen2 model with a token per character; returns its directory."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    words = [*SPECIAL, *dict.fromkeys(characters)]
    inner = Fast(models.BPE({word: number for number, word in enumerate(words)}, []))
    inner.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>").save_pretrained(str(path))
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(words), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.08, bos_token_id=None, pad_token_id=0,
        eos_token_id=1, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(str(path))
    return path


class SmallRun:
    """Rollout, trainer and algorithm of a configuration. Closed by `with`.

    values: overrides, the later ones win. environment: a component. as_sampled: what the engine gets in place of the
    trainer's weights, for a policy that differs from the one that is trained.
    """

    def __init__(
        self,
        environment: Mapping[str, Any],
        characters: str,
        seed: int,
        *values: str,
        preset: str | None = None,
        as_sampled: Callable[[Weights, int], Iterable[tuple[str, Tensor]]] = lambda weights, version: weights,
    ) -> None:
        self._stack = ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="small_run_"))
        model = write_policy(Path(folder) / "policy", characters, seed)
        overrides = [*VALUES, f"run.seed={seed}", f"model.path={model}", *values]
        self.config = config = load_config(None, overrides, preset)
        config.environment = dict(environment)
        self.rollout = self._stack.enter_context(make_rollout(config))
        self.algorithm = Algorithm.from_config(config, self.rollout.response_budget, rollout=self.rollout)
        self._stack.callback(self.algorithm.close)
        self.trainer = make_trainer(config)
        self._stack.callback(self.trainer.close)
        self._as_sampled = as_sampled
        tasks = self.rollout.environment.tasks("train")
        self.source = CURATOR.build(config.data.curator, "data.curator", tasks=tasks, seed=seed)
        self.sampled: list[Group] = []  # of the last step, before any filter
        self.steps = 0
        self._stream: Iterator[list[Group]] | None = None

    def __enter__(self) -> SmallRun:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def tokenizer(self) -> Tokenizer:
        return self.rollout.tokenizer

    def warm_up(self, trajectories: Sequence[Trajectory], updates: int) -> None:
        """Likelihood of what these say, all of them in each update."""
        batch = make_batch(trajectories)
        batch = batch.replace(weights=token_mean(batch))
        for _ in range(updates):
            self.trainer.update(batch, SFTLoss())

    def begin(self) -> None:
        """The policy as it is now is where the training starts: the reference, and what the engine samples from."""
        if "reference" in self.algorithm.needs:
            self.trainer.snapshot("reference")
        self.sync()
        prompts, rounds = self.config.rollout.prompts_per_step, self.algorithm.max_rounds
        self._stream = self.rollout.stream(self.source, prompts, admit=self._admit, max_rounds=rounds)

    def sync(self) -> None:
        """Gives the engine the weights of the trainer."""
        self.rollout.load_weights(self._as_sampled(self.trainer.weights(), self.steps), self.steps)

    def step(self) -> dict[str, float]:
        """Samples, trains, and gives the engine the new weights; the step's metrics."""
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


def demonstration(tokenizer: Tokenizer, task: SmallTask, problem: Task, act: Act, draw: random.Random, turns: int) -> Trajectory:
    """What `act` does in the task, as a trajectory without log-probs; at most so many turns."""
    episode, seen = Episode(problem), str(problem.prompt)
    tokens = tokenizer.encode(seen)
    mask, said, reward = [False] * len(tokens), [], 0.0
    stop = StopReason.MAX_TURNS
    for _ in range(turns):
        response = act(seen, draw)
        words = tokenizer.encode(response)
        said.append(Turn(0, len(tokens), len(tokens) + len(words), 0.0, 0.0, response))
        tokens, mask = tokens + words, mask + [True] * len(words)
        episode.turns += 1
        step = task.answer(episode, response)
        reward, seen = reward + step.reward, str(step.observation)
        said[-1].reward, said[-1].observation = step.reward, seen
        if step.terminated:
            stop = StopReason.TERMINATED
            break
        heard = tokenizer.encode_text(seen)
        tokens, mask = tokens + heard, mask + [False] * len(heard)
    segment = Segment(torch.tensor(tokens), torch.tensor(mask), None, torch.full((len(tokens),), -1))
    group = f"demonstration:{problem.id}"
    return Trajectory(problem.id, group, [segment], said, reward, stop, source="demonstration", prompt=str(problem.prompt))


def share_of(values: Sequence[float], share: float = 0.25) -> float:
    """The mean of the last `share` of a curve."""
    last = values[-max(1, round(share * len(values))) :]
    return sum(last) / len(last)
