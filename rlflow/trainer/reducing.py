"""Reduces a loss's metrics (B, T) to numbers that depend on neither micro-batches nor ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rlflow.errors import RLFlowError
from rlflow.types import Batch, Reduction


def reduce_tokens(metric: Tensor, batch: Batch, how: Reduction) -> Tensor:
    """One number for a micro-batch: sum(weights * metric), or the maximum or sum over the trained
    tokens (-inf or 0 of none)."""
    if how == "mean":
        return (batch.weights * metric).sum().double()
    trained = batch.weights != 0
    if how == "max":
        return torch.where(trained, metric, -torch.inf).amax().double()
    return torch.where(trained, metric, 0.0).sum(dtype=torch.float64)


def combine(total: float | None, found: Tensor, how: Reduction) -> float:
    """The number of the micro-batches so far and of one more."""
    value = float(found.detach())
    if total is None:
        return value
    return max(total, value) if how == "max" else total + value


def finish_metrics(
    totals: Mapping[str, float], reductions: Mapping[str, Reduction], batch: Batch
) -> dict[str, float]:
    """The metrics of the whole batch: means are divided by the sum of the weights, so that their
    unit does not depend on it; `loss` is the minimized sum itself."""
    share = float(batch.weights.sum()) or 1.0
    return {
        name: value if name == "loss" or reductions.get(name, "mean") != "mean" else value / share
        for name, value in totals.items()
    }


def check_batch(batch: Batch) -> None:
    """Raises RLFlowError for a batch that no update can be made of."""
    if len(batch) == 0:
        raise RLFlowError(
            "update: the batch has no rows; every trajectory of the step was aborted or "
            "filtered out."
        )
    for name in ("advantages", "weights"):
        found = getattr(batch, name).shape
        if found != batch.tokens.shape:
            raise RLFlowError(
                f"update: Batch.{name}: expected (rows, tokens) = {tuple(batch.tokens.shape)}, "
                f"found {tuple(found)}; spread one of each row: {name}[:, None] * batch.loss_mask."
            )
    # Transforms may set all weights to 0; `trainer_version` is the training step's mark
    own = batch.trainer_version is None
    if own and batch.loss_mask.any() and not batch.weights.any():
        raise RLFlowError(
            "update: Batch.weights is 0 everywhere, so nothing would be trained; fill it: "
            "batch.replace(weights=token_weights(batch))."
        )


def check_finite(what: str, found: float, updates: int) -> None:
    """Raises RLFlowError where the loss of an update or its gradient norm is not finite. (Where
    only the loss is not, the gradients mean nothing.)"""
    if not math.isfinite(found):
        raise RLFlowError(
            f"update {updates}: the {what} is {found}, expected a finite number; the weights were "
            "not changed. Look for non-finite advantages, log-probs or weights in the batch, or "
            "lower trainer.lr."
        )


def skipped(norm: float) -> dict[str, float]:
    """The metric of an update whose gradient was 0 everywhere, so that the optimizer made no
    step."""
    return {"updates_skipped": 1.0} if norm == 0 else {}
