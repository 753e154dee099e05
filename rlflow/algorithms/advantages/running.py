"""Normalisation by the statistics of all trajectories so far."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlflow.algorithms.base import Advantage
from rlflow.algorithms.statistics import Moments, first_rows, flat, mean_of
from rlflow.types import Batch
from rlflow.values import NonNegativeFloat, Share

STATE = ("count", "mean", "squares")


class RunningNormalization(Advantage):
    """(B,) float32: (reward - mean) / (population std + eps), over every trajectory of this step
    and of those before.

    The trajectory-aware relative policy optimisation of Mobile-Agent-v3, arXiv 2508.15144.
    Statistics are merged step by step (Chan et al. 1979), which equals those of the union; decay
    below 1 lets older steps count less: their count is multiplied by it. All rewards equal so far:
    exactly 0."""

    def __init__(self, eps: NonNegativeFloat = 1e-6, decay: Share = 1.0) -> None:
        self.eps = eps
        self.decay = decay
        # Squares: of the distances to the mean, added up
        self.count, self.mean, self.squares = 0.0, 0.0, 0.0

    def __call__(self, batch: Batch) -> Tensor:
        rewards = batch.require("rewards", "advantage running").double()
        self._merge(rewards[first_rows(batch)[0]])
        std = math.sqrt(self.squares / self.count)
        mean = torch.tensor(self.mean).double()
        found = Moments(torch.tensor(2), mean, torch.tensor(std).double())
        if bool(flat(found)):
            return torch.zeros(len(batch))
        return ((rewards - self.mean) / (std + self.eps)).float()

    def _merge(self, rewards: Tensor) -> None:
        before, new = self.decay * self.count, float(len(rewards))
        mean = mean_of(rewards)
        apart = mean - self.mean
        self.count = before + new
        self.squares = (
            self.decay * self.squares
            + float((rewards - mean).square().sum())
            + apart**2 * before * new / self.count
        )
        self.mean += apart * new / self.count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count, self.mean, self.squares = (float(state[name]) for name in STATE)
