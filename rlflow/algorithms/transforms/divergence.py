"""Divergences of two policies at one token, from its log-probs alone: the token against all
others."""

from __future__ import annotations

from torch import Tensor

from rlflow.types import Batch

_LEAST = 1e-7  # of a probability: beyond it the other outcome's logarithm would be infinite


def binary_kl(logprobs: Tensor, others: Tensor, batch: Batch) -> Tensor:
    """(B, T) float64 nats: p log(p / q) + (1 - p) log((1 - p) / (1 - q)), p and q from the
    log-probs; 0 off the loss mask."""
    p, q = (
        values.masked_fill(~batch.loss_mask, 0.0).double().exp().clamp(_LEAST, 1 - _LEAST)
        for values in (logprobs, others)
    )
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def binary_tv(logprobs: Tensor, others: Tensor, batch: Batch) -> Tensor:
    """(B, T) float64: |p - q|; 0 off the loss mask."""
    p, q = (
        values.masked_fill(~batch.loss_mask, 0.0).double().exp() for values in (logprobs, others)
    )
    return (p - q).abs()
