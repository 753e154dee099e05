"""Truncated importance sampling."""

from __future__ import annotations

from dataclasses import dataclass

from rlflow.algorithms.base import Level, Transform
from rlflow.algorithms.transforms.importance import mismatch, multiplied
from rlflow.types import Batch
from rlflow.values import PositiveFloat


@dataclass(frozen=True)
class TruncatedImportance(Transform):
    """Times min(k, cap), k = proximal / rollout policy, of the token or at the `level` of its row.

    Truncated importance sampling (Ionides 2008; between engine and trainer: Yao et al. 2025, "Your
    efficient RL framework secretly brings you off-policy RL training", cap 2). Metrics: capped
    (share of tokens)."""

    needs = frozenset({"proximal"})
    weighs = True

    cap: PositiveFloat = 2.0
    level: Level = "token"

    def __call__(self, batch: Batch) -> Batch:
        ratio = mismatch(batch, self.level, "transform tis")
        return multiplied(batch, ratio.clamp(max=self.cap), capped=ratio > self.cap)
