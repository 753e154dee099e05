"""Means over tokens, sequences and trajectories. These sum to 1; rows and trajectories without a
trained token are left out, and a batch without any gives zeros."""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.algorithms.statistics import first_rows, totals
from rlflow.types import Batch


def token_mean(batch: Batch) -> Tensor:
    """(B, T) every trained token counts alike (DAPO, arXiv 2503.14476)."""
    mask = batch.loss_mask.double()
    return (mask / mask.sum().clamp(min=1)).float()


def sequence_mean(batch: Batch) -> Tensor:
    """(B, T) every row counts alike, and its tokens share equally (GRPO, arXiv 2402.03300)."""
    return _mean_over(batch, torch.arange(len(batch), device=batch.tokens.device))


def trajectory_mean(batch: Batch) -> Tensor:
    """(B, T) every trajectory counts alike, its rows joined, and its tokens share equally."""
    return _mean_over(batch, first_rows(batch)[1])


def _mean_over(batch: Batch, owner: Tensor) -> Tensor:
    # In float64: a share of 1 / (tokens * units) of a long batch, added up over its tokens, must
    # still come to 1.
    mask = batch.loss_mask.double()
    _, unit = owner.unique(return_inverse=True)
    tokens = totals(mask.sum(dim=1), unit, len(batch))
    trained_units = (tokens > 0).sum().clamp(min=1)
    return (mask / (tokens.clamp(min=1)[unit, None] * trained_units)).float()
