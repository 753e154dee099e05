"""Rewards on another scale."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlflow.algorithms.base import RewardTerm
from rlflow.types import Batch


@dataclass(frozen=True)
class AffineReward(RewardTerm):
    """scale * (reward + bias) in place of each return, e.g. ASearcher's 10 * (score - .5). Where
    the advantage divides by a deviation it changes nothing."""

    scale: float = 1.0
    bias: float = 0.0

    def term(self, batch: Batch) -> Tensor:
        rewards = batch.require("rewards", "transform affine_reward").double()
        return self.scale * (rewards + self.bias) - rewards
