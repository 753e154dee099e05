"""Rewards on another scale: of a trajectory by its turns, or all alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.algorithms.base import RewardTerm
from rlflow.algorithms.statistics import first_rows
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


class TurnMeanReward(RewardTerm):
    """The mean of a trajectory's turn rewards in place of their sum (RLinf's grpo_dynamic, before
    its group normalisation). Turns without a token at the end of a trajectory do not count."""

    def term(self, batch: Batch) -> Tensor:
        first, place = first_rows(batch)
        rewards = batch.require("rewards", "transform turn_mean_reward").double()
        turn = batch.require("turn", "transform turn_mean_reward")
        last = turn.amax(dim=1) if turn.shape[1] else turn.new_full((len(turn),), -1)
        most = torch.full((len(first),), -1, dtype=last.dtype).scatter_reduce_(
            0, place, last, "amax"
        )
        return rewards / (most + 1).clamp(min=1)[place] - rewards
