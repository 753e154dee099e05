"""Advantages: how much better an attempt was than its group. Batch -> (B,), broadcast over the row's tokens."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from rlflow.errors import ConfigError, RLFlowError, did_you_mean
from rlflow.types import Batch
from rlflow.values import NonNegativeFloat

Std = Literal["sample", "population", "none"]


def grpo(batch: Batch, std: Std = "sample", eps: NonNegativeFloat = 1e-6) -> Tensor:
    """(B,) float32: (reward - group mean) / (group std + eps), from the statistics stamped while the group was whole.

    GRPO, arXiv 2402.03300 section 4.1. std: sample (Bessel's correction, as Search-R1 has it), population, or none,
    which is Dr.GRPO's reward - mean (arXiv 2503.20783; pair it with the `constant` token weights). A group of one
    attempt, or of equal rewards, gives exactly 0: the rounding of its mean must not be divided by eps. Raises
    RLFlowError where a row carries no group statistics.
    """
    if std not in get_args(Std):
        raise ConfigError(
            f"algorithm.advantage.std: expected one of {', '.join(get_args(Std))}, found '{std}'."
            f"{did_you_mean(str(std), get_args(Std))}"
        )
    who = "advantage grpo"
    rewards, size = batch.require("rewards", who), batch.require("group_size", who)
    mean, sample_std = batch.require("group_mean", who), batch.require("group_std", who)
    if bool((size < 1).any()):
        rows = (size < 1).nonzero().flatten().tolist()
        raise RLFlowError(
            f"advantage grpo: {len(rows)} of {len(batch)} rows (first: row {rows[0]}) lack group statistics: expected "
            "Trajectory.group_stats = (size, mean, std), as Rollout stamps them while a group is whole"
        )
    rounding = 4 * torch.finfo(rewards.dtype).eps * mean.abs()
    flat = (size == 1) | (sample_std <= rounding)
    centred = (rewards - mean).float()  # 1000.001 and 1000 differ by 1000.001 - 1000 only before they are rounded
    if std == "none":
        return centred.masked_fill(flat, 0.0)
    bessel = ((size - 1) / size).sqrt() if std == "population" else 1.0
    return (centred / (sample_std.float() * bessel + eps)).masked_fill(flat, 0.0)
