"""Floating-point operations of a dense decoder by its shape, and what GPUs can do at the most."""

from __future__ import annotations

from collections.abc import Sequence

from common import Shape

PEAK_BF16_FLOPS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
}
"""FLOP/s of dense bfloat16 tensor cores with float32 accumulation, without sparsity (NVIDIA's data sheets)."""


def forward_flops(shape: Shape, lengths: Sequence[int], scored: int) -> int:
    """FLOPs of one forward pass over rows of `lengths` tokens, with logits for `scored` of their tokens.

    A multiplication and an addition count two (PaLM, arXiv 2204.02311 appendix B). Matrix products only: per token 2
    for each weight of the linear layers; per pair of a query and a key that it sees (causal: L (L + 1) / 2 of a row), 4 for
    each dimension of each head; per scored token 2 for each weight of the output layer. Norms, activations, the
    embedding look-up and padding count nothing."""
    head = shape.hidden // shape.heads
    attention = shape.hidden * head * (shape.heads + 2 * shape.groups) + head * shape.heads * shape.hidden
    per_token = 2 * shape.layers * (attention + 3 * shape.hidden * shape.ffn)
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    per_pair = 4 * shape.layers * shape.heads * head
    return per_token * sum(lengths) + per_pair * pairs + 2 * shape.hidden * shape.vocab * scored


def training_flops(shape: Shape, lengths: Sequence[int], scored: int) -> int:
    """Model FLOPs of a training step: the backward pass counts twice the forward pass; what is computed again counts
    nothing."""
    return 3 * forward_flops(shape, lengths, scored)


def peak_flops(device_name: str) -> float | None:
    """FLOP/s of a GPU in bfloat16 by the name that torch gives it; None where the table has no such GPU."""
    matching = [name for name in PEAK_BF16_FLOPS if name.lower() in device_name.lower()]
    return PEAK_BF16_FLOPS[max(matching, key=len)] if matching else None
