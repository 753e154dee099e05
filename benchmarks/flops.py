"""Floating-point operations of a dense decoder by its shape, and what GPUs can do at the most."""

from __future__ import annotations

from rlflow.models.flops import forward_flops, training_flops

__all__ = ["forward_flops", "peak_flops", "training_flops"]

PEAK_FLOPS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
}
"""bfloat16 tensor cores with float32 accumulation, without sparsity (NVIDIA's data sheets)."""


def peak_flops(device_name: str) -> float | None:
    """FLOP/s of the GPU whose name is the longest in the one that torch gives; None: unknown."""
    matching = [known for known in PEAK_FLOPS if known.lower() in device_name.lower()]
    return PEAK_FLOPS[max(matching, key=len)] if matching else None
