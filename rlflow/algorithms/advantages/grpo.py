"""Group-relative advantages."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlflow.algorithms.base import compares_attempts
from rlflow.algorithms.statistics import Std, group_moments, standardized
from rlflow.types import Batch
from rlflow.values import NonNegativeFloat


@compares_attempts
def grpo(
    batch: Batch,
    std: Std = "sample",
    eps: NonNegativeFloat = 1e-6,
    single: Literal["zero", "raw"] = "zero",
) -> Tensor:
    """(B,) float32: (reward - group mean) / (group std + eps), from the statistics stamped while
    the group was whole.

    GRPO, arXiv 2402.03300 section 4.1. std: sample (Bessel's correction, as Search-R1 has it),
    population, or none, which is Dr.GRPO's reward - mean (arXiv 2503.20783; pair it with the
    `constant` token weights). A group of one attempt, or of equal rewards, gives exactly 0: the
    rounding of its mean must not be divided by eps. single raw gives an attempt that is alone, the
    others of its group having been aborted, its reward instead (Search-R1: mean 0, std 1). Raises
    RLFlowError where a row carries no group statistics."""
    who = "advantage grpo"
    rewards, found = batch.require("rewards", who), group_moments(batch, who)
    values = standardized(rewards, found, std, eps)
    return (
        torch.where(found.size == 1, rewards.double(), values) if single == "raw" else values
    ).float()
