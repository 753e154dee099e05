"""Floating-point operations of a dense decoder by its shape, and what GPUs can do at the most: those of the library."""

from __future__ import annotations

from rlflow.models.flops import forward_flops, training_flops
from rlflow.run.device_speeds import find_device

__all__ = ["forward_flops", "peak_flops", "training_flops"]


def peak_flops(device_name: str) -> float | None:
    """FLOP/s of a GPU in bfloat16 by the name that torch gives it; None where the table has no such GPU."""
    found = find_device(device_name)
    return found.matrix_flops if found is not None else None
