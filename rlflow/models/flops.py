"""Floating-point operations of a decoder, by its shape."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from rlflow.models.architecture import Architecture, placed_rules
from rlflow.models.layer_rules import EMBEDDING, OUTPUT


def forward_flops(shape: Architecture, lengths: Sequence[int], scored: int) -> int:
    """FLOPs of one forward pass over rows of `lengths` tokens, with logits for `scored` of their
    tokens.

    A multiplication and an addition count two (PaLM, arXiv 2204.02311 appendix B). Matrix products
    only: per token 2 for each weight of the linear layers, of experts those chosen; per pair of a
    query and a key that it sees (causal: L (L + 1) / 2 of a row, fewer within a window), 4 for each
    dimension of each head; per scored token 2 for each weight of the output layer. Norms, activations, the embedding
    look-up and padding count nothing."""
    per_token = 2 * _weights(shape)
    windows = [shape.window_at(layer) for layer in range(shape.layers)]
    pairs = sum(
        windows.count(window) * sum(_pairs(length, window) for length in lengths)
        for window in set(windows)
    )
    per_pair = 2 * shape.heads * (shape.key_dim + shape.value_dim)
    return per_token * sum(lengths) + per_pair * pairs + 2 * shape.hidden * shape.vocab * scored


def _pairs(length: int, window: int | None) -> int:
    """Of a query and a key that it sees, in a row."""
    hidden = 0 if window is None else max(0, length - window)
    return (length * (length + 1) - hidden * (hidden + 1)) // 2


@functools.cache
def _weights(shape: Architecture) -> int:
    """Those in matrices of all layers that a token is multiplied by; of experts, those of as many
    as it chooses."""
    chosen = shape.experts.top_k if shape.experts is not None else 0
    return sum(
        math.prod(matrix)
        for rule, _ in placed_rules(shape)
        if not (rule.stands_for(EMBEDDING) or rule.stands_for(OUTPUT))
        and (rule.expert is None or rule.expert < chosen)
        for matrix in rule.shapes(shape)
        if len(matrix) == 2
    )


def training_flops(shape: Architecture, lengths: Sequence[int], scored: int) -> int:
    """Model FLOPs of a training step: the backward pass counts twice the forward pass; what is
    computed again counts nothing."""
    return 3 * forward_flops(shape, lengths, scored)
