"""Leave-one-out advantages."""

from __future__ import annotations

from torch import Tensor

from rlflow.algorithms.base import compares_attempts
from rlflow.algorithms.statistics import group_moments, standardized
from rlflow.types import Batch


@compares_attempts
def rloo(batch: Batch) -> Tensor:
    """(B,) float32: reward - mean reward of the other attempts of its group = G / (G - 1) * (reward
    - group mean).

    RLOO, arXiv 2402.14740 (Kool et al. 2019): each attempt's baseline does not depend on it, so the
    gradient is unbiased. An attempt whose companions were all aborted has no baseline and gets 0.
    Raises RLFlowError where a row carries no group statistics."""
    found = group_moments(batch, "advantage rloo")
    centred = standardized(batch.require("rewards", "advantage rloo"), found, "none", 0.0)
    return (centred * found.size / (found.size - 1).clamp(min=1)).float()
