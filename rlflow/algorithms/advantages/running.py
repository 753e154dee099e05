"""Normalisation by the statistics of all trajectories so far."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.algorithms.base import Advantage
from rlflow.algorithms.statistics import Moments, first_rows, flat, mean_of
from rlflow.types import Batch
from rlflow.values import NonNegativeFloat, Share


@dataclass
class RunningNormalization(Advantage):
    """(B,) float32: (reward - mean) / (population std + eps), over every trajectory of this step
    and of those before.

    The trajectory-aware relative policy optimisation of Mobile-Agent-v3, arXiv 2508.15144.
    Statistics are merged step by step (Chan et al. 1979), which equals those of the union; decay
    below 1 lets older steps count less: their count is multiplied by it. All rewards equal so far:
    exactly 0."""

    remembers = ("count", "mean", "squares")

    eps: NonNegativeFloat = 1e-6
    decay: Share = 1.0
    # Squares: of the distances to the mean, added up
    _count = _mean = _squares = 0.0

    def __call__(self, batch: Batch) -> Tensor:
        rewards = batch.require("rewards", "advantage running").double()
        self._merge(rewards[first_rows(batch)[0]])
        std = math.sqrt(self._squares / self._count)
        mean = torch.tensor(self._mean).double()
        found = Moments(torch.tensor(2), mean, torch.tensor(std).double())
        if bool(flat(found)):
            return torch.zeros(len(batch))
        return ((rewards - self._mean) / (std + self.eps)).float()

    def _merge(self, rewards: Tensor) -> None:
        before, new = self.decay * self._count, float(len(rewards))
        mean = mean_of(rewards)
        apart = mean - self._mean
        self._count = before + new
        self._squares = (
            self.decay * self._squares
            + float((rewards - mean).square().sum())
            + apart**2 * before * new / self._count
        )
        self._mean += apart * new / self._count
