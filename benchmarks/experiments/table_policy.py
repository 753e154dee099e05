"""A policy that is a table of logits, for runs of a second: everything but the model and its sampling is rlflow's own.

A task is a letter of 4; the answer is 3 letters of 8, one of them right in each place, and the reward the share of right ones:
1/8 by chance, 1 at the optimum, which a table can express. There is a logit for each letter, task and place.

Real are the training step, `make_batch`, advantage, aggregate, transforms and losses of a configuration, and of the tests'
reference trainer `score` and `update` with AdamW, clipping of the gradient and the refusal of what is not finite. Not real is the model,
so nothing here is about what tasks share; and samples are drawn from the table, not by an engine.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlflow.algorithms.algorithm import Algorithm
from rlflow.config.schema import load_config
from rlflow.loop import training_step
from rlflow.report.timer import PhaseTimer
from rlflow.trainer.options import TrainerOptions
from rlflow.types import Group, Segment, StopReason, Task, Trajectory, Turn, stamp
from tests.reference.trainer import ReferenceTrainer

TASKS, PLACES, LETTERS, ATTEMPTS = 4, 3, 8, 8
CHANCE = 1 / LETTERS
"""The expected reward of the policy that a run begins with, which draws evenly."""


class TableModel(torch.nn.Module):
    """(B, T) ids, of which the first is the task -> logits (B, T, V) of the next token, as a language model gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(TASKS, PLACES, LETTERS))

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        chosen = self.table[input_ids[:, 0]]
        return SimpleNamespace(logits=torch.nn.functional.pad(chosen, (0, 0, 0, 1)))


class TableTrainer(ReferenceTrainer):
    """The reference trainer over a table; its options are those of the `trainer` section."""

    def __init__(self, **options: Any) -> None:
        given = TrainerOptions.of(options)
        adamw = given.adamw
        self.learning_rate = given.learning_rate()
        self.dtype, self.device, self.values = torch.float32, torch.device("cpu"), False
        self.max_gradient_norm, self.tokens_per_microbatch = (
            given.max_gradient_norm,
            given.tokens_per_microbatch,
        )
        self.model = TableModel()
        self.vocab = self.model.table.shape[-1]
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=given.lr,
            betas=(adamw.beta1, adamw.beta2),
            eps=adamw.eps,
            weight_decay=0.0,
        )
        self.updates = 0
        self.snapshots: dict[str, dict[str, Tensor]] = {}
        self.frozen: dict[str, torch.nn.Module] = {}
        self.frozen_vocab: dict[str, int] = {}

    @torch.no_grad()
    def logprobs(self) -> Tensor:
        """(task, place, letter) nats."""
        model: Any = self.model
        return model.table.detach().log_softmax(dim=-1)


class Untimed(PhaseTimer):
    """Measures nothing: a tenth of the time of steps as small as these."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield


def make_algorithm(algorithm: Mapping[str, Any], seed: int) -> Algorithm:
    """The parts that an `algorithm` section names. Raises ConfigError for what makes no sense together."""
    section = [f"algorithm.{key}={json.dumps(value)}" for key, value in algorithm.items()]
    config = load_config(None, [f"run.seed={seed}", *section])
    return Algorithm.from_config(config, response_budget=PLACES)


def right_answers(seed: int) -> Tensor:
    """(task, place) the right letters."""
    return torch.randint(LETTERS, (TASKS, PLACES), generator=torch.Generator().manual_seed(seed))


def sampled(logprobs: Tensor, right: Tensor, version: int, draw: torch.Generator) -> list[Group]:
    """A group of attempts at every task, by the policy of that version with these log-probs."""
    chances = logprobs.exp().reshape(TASKS * PLACES, LETTERS)
    letters = torch.multinomial(chances, ATTEMPTS, replacement=True, generator=draw).reshape(
        TASKS, PLACES, ATTEMPTS
    )
    found = logprobs.gather(2, letters)
    rewards = (letters == right[:, :, None]).double().mean(dim=1)
    mask, versions = (
        torch.tensor([False, *[True] * PLACES]),
        torch.tensor([-1, *[version] * PLACES]),
    )
    prompts = torch.arange(TASKS)[:, None, None].expand(TASKS, ATTEMPTS, 1)
    tokens = torch.cat([prompts, letters.transpose(1, 2)], dim=2)
    known = torch.nn.functional.pad(found.transpose(1, 2), (1, 0))
    groups = []
    for task in range(TASKS):
        trajectories = []
        for attempt in range(ATTEMPTS):
            segment = Segment(tokens[task, attempt], mask, known[task, attempt], versions)
            reward = float(rewards[task, attempt])
            turn = Turn(segment=0, start=1, stop=1 + PLACES, reward=reward, duration_s=1.0)
            trajectories.append(
                Trajectory(
                    f"{task}",
                    f"{version}:{task}",
                    [segment],
                    [turn],
                    reward,
                    StopReason.TERMINATED,
                    attempt=attempt,
                )
            )
        stamp(trajectories)
        groups.append(Group(f"{version}:{task}", Task(f"{task}", ""), trajectories))
    return groups


def train_table(
    algorithm: Algorithm, trainer: TableTrainer, right: Tensor, *, steps: int, lag: int, seed: int
) -> Iterator[dict[str, float]]:
    """The metrics of one step after another, each on samples of the policy `lag` steps before it."""
    timer, draw = Untimed(), torch.Generator().manual_seed(seed)
    policies = deque([trainer.logprobs()], maxlen=lag + 1)
    for step in range(steps):
        yield training_step(
            step, sampled(policies[0], right, max(0, step - lag), draw), trainer, algorithm, timer
        )
        policies.append(trainer.logprobs())


def expected_reward(logprobs: Tensor, right: Tensor) -> float:
    """Of an answer drawn from the policy: the mean chance of the right letter."""
    return float(logprobs.gather(2, right[:, :, None]).exp().mean())


def entropy(logprobs: Tensor) -> float:
    """Nats per letter, the mean over tasks and places."""
    return float(-(logprobs.exp() * logprobs).sum(dim=-1).mean())
