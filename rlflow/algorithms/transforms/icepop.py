"""IcePop: tokens on which engine and trainer disagree are left out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlflow.algorithms.base import Transform
from rlflow.algorithms.transforms.importance import mismatch, multiplied
from rlflow.errors import ConfigError
from rlflow.types import Batch
from rlflow.values import NonNegativeFloat, PositiveFloat


@dataclass(frozen=True)
class IcePop(Transform):
    """Times k where low <= k <= high, else 0; k = proximal / rollout policy of the token.

    Ring-1T, arXiv 2510.18855 (0.5 to 5): `mis` of tokens with a bound on either side.
    """

    needs = frozenset({"proximal"})
    level = "token"
    weighs = True

    low: NonNegativeFloat = 0.5
    high: PositiveFloat = 5.0

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ConfigError(
                f"transform icepop: expected low below high, found {self.low} and {self.high}"
            )

    def __call__(self, batch: Batch) -> Batch:
        ratio = mismatch(batch, "token", "transform icepop")
        return multiplied(
            batch, torch.where((self.low <= ratio) & (ratio <= self.high), ratio, 0.0)
        )
