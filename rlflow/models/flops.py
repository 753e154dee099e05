"""Floating-point operations of a decoder, by its shape."""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.models.architecture import Architecture


def forward_flops(shape: Architecture, lengths: Sequence[int], scored: int) -> int:
    """FLOPs of one forward pass over rows of `lengths` tokens, with logits for `scored` of their
    tokens.

    A multiplication and an addition count two (PaLM, arXiv 2204.02311 appendix B). Matrix products
    only: per token 2 for each weight of the linear layers, of experts those chosen; per pair of a query and a key that it
    sees (causal: L (L + 1) / 2 of a row), 4 for each dimension of each head; per scored token 2 for
    each weight of the output layer. Norms, activations, the embedding look-up and padding count
    nothing."""
    query, key = shape.heads * shape.head_dim, shape.groups * shape.head_dim
    attention = shape.hidden * (query + 2 * key) + query * shape.hidden
    per_token = 2 * (shape.layers * attention + _mlp_weights(shape))
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    per_pair = 4 * shape.layers * query
    return per_token * sum(lengths) + per_pair * pairs + 2 * shape.hidden * shape.vocab * scored


def _mlp_weights(shape: Architecture) -> int:
    """Those of all layers that a token is multiplied by: MLPs, or routers, the experts chosen and
    what stands beside them."""
    dense, experts = 3 * shape.hidden * shape.ffn, shape.experts
    if experts is None:
        return shape.layers * dense
    gate = shape.hidden if shape.shared_gate else 0
    chosen = experts.top_k * experts.ffn + experts.shared_ffn
    sparse = shape.hidden * experts.count + 3 * shape.hidden * chosen + gate
    return sum(sparse if here else dense for here in experts.sparse)


def training_flops(shape: Architecture, lengths: Sequence[int], scored: int) -> int:
    """Model FLOPs of a training step: the backward pass counts twice the forward pass; what is
    computed again counts nothing."""
    return 3 * forward_flops(shape, lengths, scored)
