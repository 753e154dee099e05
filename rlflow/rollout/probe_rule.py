"""Decides whether engine and trainer agree on the log-probs of a weight probe's tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOGITS = 16.0
"""The size of large logits of a language model is between this and twice this."""
TOKENS = 256
"""Of a probe in low precision: what a mean over them is off by is a sixteenth of a token's."""
MEAN, HIGH, QUANTILE = 0.65, 2.5, 0.95
"""In spacings of log-probs: how far apart the two may be in the mean, and at this quantile."""


def spacing(dtype: torch.dtype, temperature: float) -> float:
    """Nats between neighbouring log-probs of large logits in a number format, at a temperature (1
    where that is 0). 0 for float32, in which probes are compared token by token.

    bfloat16 has 8 significant bits, so numbers from 16 to 32 are 16 / 2^7 = 0.125 apart; a
    temperature of 0.7 makes 0.179 nats of that."""
    if dtype == torch.float32:
        return 0.0
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(LOGITS)) / (temperature or 1.0)


def summary(gaps: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the high quantile of absolute differences, nats (..., tokens)."""
    return gaps.mean(-1), gaps.quantile(QUANTILE, -1)


def agree(gaps: Tensor, step: float, tolerance: float) -> Tensor:
    """Whether the absolute differences (..., tokens), nats, are those of honest weights. step: the
    `spacing`; 0: no token may be off by more than `tolerance`.

    In low precision both sides round logits to multiples of the step, after adding in another
    order. Where that moves logits by 0.02 to 0.05 (what is seen between inference engines and
    trainers, a mean gap of 0.03 nats and more), a token's gap is 0.17 to 0.44 steps in the mean and
    0.5 to 1.7 at the 0.95 quantile, for logits from 12 to 60 at a temperature of 0.7; single tokens
    are off by 3 steps and more, so that a bound on the largest of 32 ended a share of honest syncs.
    Means over 256 tokens scatter by less than 0.05 steps: 0.65 and 2.5 are passed by all of 10,000.
    Log-probs of another temperature (1 in place of 0.7) are 0.9 steps off in the mean at least,
    weights of another model by far more."""
    if not step:
        return gaps.amax(-1) <= tolerance  # not where it is NaN
    mean, high = summary(gaps)
    return (mean <= MEAN * step) & (high <= HIGH * step)


def told(gaps: Tensor, step: float, tolerance: float) -> str:
    """How far the two are apart, and what was expected."""
    if not step:
        return (
            f"{gaps.max():.3g} nats on a token of the probe, more than its tolerance of "
            f"{tolerance:g}"
        )
    mean, high = summary(gaps)
    return (
        f"{mean:.3g} nats in the mean and {high:.3g} at the {QUANTILE} quantile of the probe's "
        f"{gaps.numel()} tokens; expected at most {MEAN * step:.3g} and {HIGH * step:.3g}"
    )
