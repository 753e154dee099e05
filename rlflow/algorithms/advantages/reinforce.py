"""Plain REINFORCE: the return, minus a baseline or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from rlflow.algorithms.base import Advantage
from rlflow.algorithms.statistics import (
    first_rows,
    group_moments,
    mean_of,
    standardized,
)
from rlflow.types import Batch
from rlflow.values import Share


@dataclass
class Reinforce(Advantage):
    """(B,) float32: reward - baseline (Williams 1992).

    baseline: none; group, the mean of the attempts at the same task (as grpo with std none); or
    running, an exponential moving average of the steps' mean rewards: b <- decay * b + (1 - decay)
    * mean. The one before the step is subtracted, so that no attempt is its own baseline; the first
    step subtracts its own mean. It needs no second attempt at a task. decay .95 is that of
    role-conditioned baselines, arXiv 2506.24119 (which updates with each attempt before it
    subtracts)."""

    baseline: Literal["none", "group", "running"] = "group"
    decay: Share = 0.95

    def __post_init__(self) -> None:
        self.compares_attempts = self.baseline == "group"
        self.average: float | None = None  # of the steps so far

    def __call__(self, batch: Batch) -> Tensor:
        who = "advantage reinforce"
        rewards = batch.require("rewards", who)
        if self.baseline == "none":
            return rewards.float()
        if self.baseline == "group":
            return standardized(rewards, group_moments(batch, who), "none", 0.0).float()
        mean = mean_of(rewards[first_rows(batch)[0]])
        before = mean if self.average is None else self.average
        self.average = before + (1 - self.decay) * (mean - before)
        return (rewards.double() - before).float()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.average is None else {"average": self.average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.average = state.get("average")
