"""M2PO: a bound on the second moment of the log-ratio, in the four variants that are in use."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlflow.algorithms.base import MAX_LOG_RATIO, Transform, anchor_logprobs, log_ratio
from rlflow.algorithms.transforms.importance import multiplied
from rlflow.types import Batch
from rlflow.values import PositiveFloat

EDGE = 1e-6  # of a ratio, which the next forward pass has again only up to rounding
Variant = Literal["mask", "winsor", "range", "mask_all"]


@dataclass(frozen=True)
class M2PO(Transform):
    """M2 = (log rho)^2, rho = policy just before this update / rollout policy, its mean held to the
    threshold (nats squared).

    mask (arXiv 2510.01161 algorithm 1): of the tokens on which PPO could clip (A > 0 and rho > 1,
    or A < 0 and rho < 1) those with the largest M2 are left out until the mean of the others is <=
    threshold; the kernel is ppo_clip with null clips. winsor (the authors' code, M2PO): x with mean
    over all tokens of min(M2, x^2) = threshold; ppo_clip to [min(e^-x, 0.7), max(e^x, 1.5)]. range
    (AstraFlow, threshold 0.004 or 0.01): ppo_clip to [max(e^-x, 0.05), min(e^x, 21)], x^2 the
    largest M2 with which the mean is < threshold, the range 1e-6 wider, as its token stands on the
    border and is kept whatever the rounding; to the widest range where nothing exceeds it. mask_all
    (AReaL): as mask over all tokens, rho = rollout / proximal policy, until the mean is <
    threshold, one token at least being kept; beside `decoupled`.

    The cutoff is by value, over the whole minibatch: equal ones are kept or left out together,
    whatever the order of rows. Metrics: second_moment, the mean before."""

    level = "token"
    trusts = True

    variant: Variant = "mask"
    threshold: PositiveFloat = 0.04

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        policy = "proximal" if self.variant == "mask_all" else "current"
        return frozenset({policy, "rollout"})

    @property
    def bounds(self) -> bool:  # type: ignore[override]
        return self.variant in ("winsor", "range")

    def __call__(self, batch: Batch) -> Batch:
        policy = batch.require(
            "proximal_logprobs" if self.variant == "mask_all" else "current_logprobs",
            "transform m2po",
        )
        log_of_ratio = log_ratio(
            policy, anchor_logprobs(batch, "rollout", "transform m2po"), batch.loss_mask
        )
        chosen = batch.loss_mask
        if self.variant in ("mask", "range"):
            chosen = chosen & (batch.advantages * log_of_ratio > 0)
        moments = log_of_ratio[chosen].double().square()
        mean = float(moments.mean()) if len(moments) else 0.0
        reported = torch.full(batch.tokens.shape, mean)
        if self.bounds:
            low, high = (winsor_range if self.variant == "winsor" else suffix_range)(
                moments, self.threshold
            )
            limits = {
                "ratio_low": torch.full(batch.tokens.shape, low),
                "ratio_high": torch.full(batch.tokens.shape, high),
            }
            return batch.replace(**limits, metrics={"second_moment": reported})
        keep = torch.ones_like(chosen)
        keep[chosen] = kept(moments, self.threshold, strict=self.variant == "mask_all")
        return multiplied(batch, keep, second_moment=reported)


def kept(moments: Tensor, threshold: float, strict: bool) -> Tensor:
    """(n,) bool: those not above the largest value up to which the mean is <= threshold; strict: <
    threshold, and the least in any case. Without it, all may be left out."""
    ordered = moments.sort().values
    # Of each value's equals: they stay or go together
    last = torch.searchsorted(ordered, moments, right=True) - 1
    mean = (ordered.cumsum(0) / torch.arange(1, len(ordered) + 1))[last]
    return (mean < threshold) | (moments == ordered[:1]) if strict else mean <= threshold


def winsor_range(moments: Tensor, threshold: float) -> tuple[float, float]:
    """Ratios at which the mean of min(M2, x^2) is the threshold, never tighter than 0.7 to 1.5;
    without a limit where the mean of M2 itself is not above it."""
    ordered, count = moments.sort().values, len(moments)
    below = torch.cat([ordered.new_zeros(1), ordered.cumsum(0)])[:-1]
    # X^2, if it is all of those from here on that exceed it
    level = (threshold * count - below) / torch.arange(count, 0, -1)
    found = (level <= ordered).nonzero().flatten()
    x = math.sqrt(float(level[found[0]])) if len(found) else MAX_LOG_RATIO
    return min(math.exp(-x), 0.7), max(math.exp(x), 1.5)


def suffix_range(moments: Tensor, threshold: float) -> tuple[float, float]:
    """Ratios e^-x to e^x within 0.05 to 21, x^2 the largest value up to which the mean is <
    threshold, or the least value; the widest range where the mean of all is not above the
    threshold."""
    if not len(moments) or float(moments.mean()) <= threshold:
        return 0.05, 21.0
    x = math.sqrt(float(moments[kept(moments, threshold, strict=True)].max()))
    return max(math.exp(-x) * (1 - EDGE), 0.05), min(math.exp(x) * (1 + EDGE), 21.0)
