"""Maximum-likelihood advantages."""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.algorithms.base import compares_attempts
from rlflow.algorithms.statistics import group_moments, standardized
from rlflow.errors import RLFlowError
from rlflow.types import Batch


@compares_attempts
def maxrl(batch: Batch) -> Tensor:
    """(B,) float32: (reward - group mean) / group mean, for rewards from 0, 0 and 1 as a rule.

    MaxRL, arXiv 2602.02710: the mean of a group of 0s and 1s estimates the probability p of
    success, and the gradient of log p is that of p divided by p: hard tasks weigh more. A group
    that always or never succeeds gives exactly 0. Raises RLFlowError for a negative reward, of
    which there is no logarithm."""
    who = "advantage maxrl"
    rewards, found = batch.require("rewards", who), group_moments(batch, who)
    if bool((rewards < 0).any()):
        found_least = float(rewards.min())
        raise RLFlowError(
            f"{who}: expected rewards from 0, found {found_least:g}; choose another advantage, or "
            "shift them"
        )
    centred = standardized(rewards, found, "none", 0.0)
    return torch.where(found.mean > 0, centred / found.mean, 0.0).float()
