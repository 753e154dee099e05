"""Adapters of random numbers over a model directory, as a trainer sends them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from rlflow.models.adapter import PROJECTIONS, adapter_update
from rlflow.models.architecture import huggingface_shapes, stored_architecture
from rlflow.models.huggingface import read_config


def drawn_adapter(
    path: Path,
    rank: int = 4,
    scale: float = 2.0,
    seed: int = 0,
    targets: tuple[str, ...] = PROJECTIONS,
    dtype: torch.dtype = torch.float32,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an update: both factors of each target, large enough to change what is
    sampled."""
    generator = torch.Generator().manual_seed(seed)
    factors: list[tuple[str, Tensor]] = []
    for name, shape in huggingface_shapes(stored_architecture(read_config(path))).items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in targets and "experts" not in layer:
            outputs, inputs = shape
            a = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            b = 0.2 * torch.randn(outputs, rank, generator=generator)
            factors.append((f"{layer}.lora_A.weight", a.to(dtype)))
            factors.append((f"{layer}.lora_B.weight", b.to(dtype)))
    return adapter_update(scale, factors)
