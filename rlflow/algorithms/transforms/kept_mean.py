"""Means over the tokens that keep-masks have left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from rlflow.algorithms.base import Transform
from rlflow.algorithms.statistics import first_rows, totals
from rlflow.types import Batch


@dataclass(frozen=True)
class KeptMean(Transform):
    """The policy-gradient kernels of the kept tokens (coefficient not 0) times the weight of all /
    the weight of the kept ones.

    Weights are made before any mask, so that without this the denominator is the original token
    count (as AReaL and M2PO have it); put last among the transforms, it is the count of the kept
    tokens (as masked importance sampling often has it). per: where the weight is made good, over
    the batch (token_mean), or within each trajectory (trajectory_mean) or row (sequence_mean).
    Where nothing is kept, nothing changes. Other terms of the loss are over all tokens, and stay.
    """

    level = "sequence"

    per: Literal["batch", "trajectory", "row"] = "batch"

    def __call__(self, batch: Batch) -> Batch:
        if batch.coefficients is None:
            return batch
        weights = batch.weights.double()
        rows = torch.arange(len(batch))
        unit = {
            "batch": torch.zeros_like(rows),
            "row": rows,
            "trajectory": first_rows(batch)[1],
        }[self.per]
        kept = torch.where(batch.coefficients != 0, weights, 0.0)
        whole, left = (totals(one.sum(dim=1), unit, len(batch)) for one in (weights, kept))
        factor = torch.where(left > 0, whole / left, 1.0)
        return batch.replace(coefficients=(batch.coefficients * factor[unit][:, None]).float())
