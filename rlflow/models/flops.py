"""Floating-point operations of a decoder, by its shape."""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.models.architecture import Architecture


def forward_flops(shape: Architecture, lengths: Sequence[int], scored: int) -> int:
    """FLOPs of one forward pass over rows of `lengths` tokens, with logits for `scored` of their
    tokens.

    A multiplication and an addition count two (PaLM, arXiv 2204.02311 appendix B). Matrix products
    only: per token 2 for each weight of the linear layers, of experts those chosen; per pair of a
    query and a key that it sees (causal: L (L + 1) / 2 of a row), 4 for each dimension of each
    head; per scored token 2 for each weight of the output layer. Norms, activations, the embedding
    look-up and padding count nothing."""
    per_token = 2 * (shape.layers * _attention_weights(shape) + _mlp_weights(shape))
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    latent = shape.latent
    both = 2 * shape.head_dim if latent is None else latent.plain + latent.rotating + latent.value
    per_pair = 2 * shape.layers * shape.heads * both
    return per_token * sum(lengths) + per_pair * pairs + 2 * shape.hidden * shape.vocab * scored


def _attention_weights(shape: Architecture) -> int:
    """Of a layer."""
    hidden, latent = shape.hidden, shape.latent
    if latent is None:
        query, key = shape.heads * shape.head_dim, shape.groups * shape.head_dim
        return hidden * (query + 2 * key) + query * hidden
    query, rank = shape.size("latent_query"), latent.query_rank
    queries = hidden * query if rank is None else (hidden + query) * rank
    keys_values = hidden * shape.size("latent") + latent.key_rank * shape.size("latent_key_value")
    return queries + keys_values + shape.size("value") * hidden


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
