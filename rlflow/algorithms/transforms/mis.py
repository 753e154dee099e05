"""Masked importance sampling."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlflow.algorithms.base import Level, Transform
from rlflow.algorithms.transforms.importance import mismatch, multiplied
from rlflow.errors import ConfigError
from rlflow.types import Batch
from rlflow.values import NonNegativeFloat, PositiveFloat


@dataclass(frozen=True)
class MaskedImportance(Transform):
    """Times k where low <= k <= high, else 0; k = proximal / rollout policy, of the token or at the
    `level` of its row.

    With `weigh: false` times 1 in place of k: a filter alone, which goes with any kernel. A
    geometric mean is near 1, and so are its bounds (0.99 to 1.01, or up to 0.5 to 2). Liu et al.
    2025, "When speed kills stability"."""

    needs = frozenset({"proximal"})

    high: PositiveFloat = 2.0
    low: NonNegativeFloat = 0.0
    level: Level = "token"
    weigh: bool = True

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ConfigError(
                f"transform mis: expected low below high, found {self.low} and {self.high}"
            )

    @property
    def weighs(self) -> bool:  # type: ignore[override]
        return self.weigh

    def __call__(self, batch: Batch) -> Batch:
        ratio = mismatch(batch, self.level, "transform mis")
        keep = (self.low <= ratio) & (ratio <= self.high)
        return multiplied(batch, torch.where(keep, ratio if self.weigh else 1.0, 0.0))
