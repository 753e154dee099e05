"""The mean of a trajectory's turn rewards in place of their sum."""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.algorithms.statistics import first_rows
from rlflow.types import Batch


def turn_mean(batch: Batch) -> Tensor:
    """(B,) float64: what makes return / turns of each return (RLinf's grpo_dynamic, before its group normalisation). Turns
    without a token at the end of a trajectory do not count."""
    first, place = first_rows(batch)
    rewards = batch.require("rewards", "reward term turn_mean").double()
    turn = batch.require("turn", "reward term turn_mean")
    last = turn.amax(dim=1) if turn.shape[1] else turn.new_full((len(turn),), -1)
    most = torch.full((len(first),), -1, dtype=last.dtype).scatter_reduce_(0, place, last, "amax")
    return rewards / (most + 1).clamp(min=1)[place] - rewards
