"""Several named rewards, each normalised on its own before they are added."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.algorithms.base import Advantage
from rlflow.algorithms.statistics import (
    Std,
    first_rows,
    named_moments,
    named_rewards,
    standardized,
    whitened,
)
from rlflow.errors import RLFlowError, did_you_mean
from rlflow.types import Batch
from rlflow.values import NonNegativeFloat

logger = logging.getLogger(__name__)


@dataclass
class GDPO(Advantage):
    """(B,) float32: sum over names of weight * (reward - group mean) / (group std + eps), then
    normalised over the batch's trajectories (mean 0, population std 1).

    GDPO, arXiv 2601.05242: normalised together, rewards of different scale drown each other. The
    rewards are those that the environment gives by name (`Step.rewards`); weights: of all of them
    1, or those named here. A name that no attempt of the step got adds 0; up to the first step with
    named rewards a warning tells the weights that have none. A group in which a reward does not
    differ gets nothing from it. whiten false leaves the last step out. Raises RLFlowError without
    weights until the environment has named a reward."""

    compares_attempts = True
    reads_rewards = False  # but the named ones
    remembers = ("seen",)

    weights: dict[str, float] | None = None
    std: Std = "sample"
    eps: NonNegativeFloat = 1e-6
    whiten: bool = True
    _seen = False  # a named reward

    def __call__(self, batch: Batch) -> Tensor:
        rewards = named_rewards(batch)
        weights = dict.fromkeys(rewards, 1.0) if self.weights is None else self.weights
        if not (rewards or weights or self._seen):
            raise RLFlowError(
                "advantage gdpo: the environment gave no named rewards; expected Step.rewards = "
                "{name: value}; where they are rare, name them in algorithm.advantage.weights"
            )
        total = torch.zeros(len(batch), dtype=torch.float64)
        for name, weight in weights.items():
            if name in rewards:
                found = named_moments(batch, name, "advantage gdpo")
                total += weight * standardized(rewards[name], found, self.std, self.eps)
            elif not self._seen:
                logger.warning(
                    "algorithm.advantage.weights: the environment gave no reward '%s' in this "
                    "step, only %s; it counts as 0.%s",
                    name,
                    ", ".join(sorted(rewards)) or "none",
                    did_you_mean(name, rewards),
                )
        self._seen |= bool(rewards)
        if self.whiten:
            first, place = first_rows(batch)
            total = whitened(total[first], torch.ones(len(first)))[place]
        return total.float()
