"""Optimizers by name: their options. Each backend makes its own of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from rlflow.components import Kind
from rlflow.values import NonNegativeFloat, PositiveFloat, Range

OPTIMIZER = Kind("optimizer", __name__)
BUILT_IN = {"adamw": f"{__name__}:AdamW"}
"""Name -> `module:Name`."""


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay, which spares biases and norms (Megatron's rule: every
    one-dimensional parameter)."""

    beta1: Annotated[float, Range(0, below=1)] = 0.9
    beta2: Annotated[float, Range(0, below=1)] = 0.95
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.01
    offload: bool = False  # moments and float32 weights in host memory, updated there; GPUs only
