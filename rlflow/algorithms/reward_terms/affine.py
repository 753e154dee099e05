"""Rewards on another scale."""

from __future__ import annotations

from torch import Tensor

from rlflow.types import Batch


def affine(batch: Batch, scale: float = 1.0, bias: float = 0.0) -> Tensor:
    """(B,) float64: what makes scale * (reward + bias) of each return, e.g. ASearcher's 10 * (score - .5). Where the advantage
    divides by a deviation it changes nothing."""
    rewards = batch.require("rewards", "reward term affine").double()
    return scale * (rewards + bias) - rewards
