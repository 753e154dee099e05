"""Rows of groups that all score the same get no weight, in any term of the loss."""

from __future__ import annotations

import torch

from rlflow.algorithms.base import Transform
from rlflow.types import Batch


class ZeroVarianceRows(Transform):
    """Sets the weights of rows to 0 whose group's returns had no spread, and scales the others up
    to the same sum.

    Their advantages are 0 in any case; this takes them out of the mean, and out of KL and entropy
    terms. Groups that were never stamped stay. Where no row is left, all weights are 0."""

    def __call__(self, batch: Batch) -> Batch:
        who = "zero_variance_rows"
        size, mean = batch.require("group_size", who), batch.require("group_mean", who)
        spread = batch.require("group_std", who)
        rounding = 4 * torch.finfo(spread.dtype).eps * mean.abs()
        alike = (size > 0) & (spread <= rounding)
        weights = batch.weights.double() * ~alike[:, None]
        total = weights.sum()
        scale = batch.weights.double().sum() / total if bool(total != 0) else total
        return batch.replace(weights=(weights * scale).to(batch.weights.dtype))
