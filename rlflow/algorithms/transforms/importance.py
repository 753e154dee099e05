"""Base of the importance corrections: the ratio of the trainer's policy to the one that sampled,
and where a factor goes."""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.algorithms.base import MAX_LOG_RATIO, Level, anchor_logprobs, log_ratio
from rlflow.types import SOURCES, Batch


def mismatch(batch: Batch, level: Level, who: str) -> Tensor:
    """(B, T) ratio of the proximal to the rollout policy at that level, 1 off the loss mask:
    staleness of the sample, and what the engine's kernels and precision add to it. 1 too for rows
    from elsewhere (`Batch.source`) that came without log-probs: the proximal policy's own stand in,
    as for injected rows of DART (arXiv 2509.23866)."""
    proximal = batch.require("proximal_logprobs", who)
    if batch.source is not None and batch.logprobs_known is not None:
        stand_in = ~batch.logprobs_known & (batch.source != SOURCES.index("local"))
        logprobs = torch.where(stand_in[:, None], proximal, batch.logprobs)
        batch = batch.replace(logprobs=logprobs, logprobs_known=batch.logprobs_known | stand_in)
    return at_level(
        log_ratio(proximal, anchor_logprobs(batch, "rollout", who), batch.loss_mask),
        batch.loss_mask,
        level,
    ).exp()


def at_level(log_of_ratio: Tensor, mask: Tensor, level: Level) -> Tensor:
    """(B, T) log-ratios of tokens, or their row's sum (`sequence`: the product of ratios), mean
    (`geometric`) or maximum on every token of the row; 0 off the mask, within +-20 nats."""
    if level == "token":
        return log_of_ratio
    if level == "max":
        row = log_of_ratio.masked_fill(~mask, -torch.inf).amax(dim=1, keepdim=True)
    else:
        row = log_of_ratio.sum(dim=1, keepdim=True)
    if level == "geometric":
        row = row / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(mask, row, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def multiplied(batch: Batch, factor: Tensor, **metrics: Tensor) -> Batch:
    """The batch with its coefficients times the factor (B, T), and what the transform reports of it
    (B, T)."""
    factor = factor.float()
    coefficients = factor if batch.coefficients is None else batch.coefficients * factor
    return batch.replace(
        coefficients=coefficients,
        metrics={name: value.float() for name, value in metrics.items()},
    )
