"""What devices can do at the most, and how much of it a training run gets: a table for estimates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """matrix_flops: FLOP/s of dense products in the training precision. memory_rate: bytes/s. memory_gib: of the
    device, None: that of the machine. training_share: of `matrix_flops`, what a training step's own operations make; an
    assumption for GPUs."""

    matrix_flops: float
    memory_rate: float
    memory_gib: float | None
    training_share: float = 0.35


GPUS = {
    "A100": Device(312e12, 2.04e12, 80),
    "H100 PCIe": Device(756e12, 2.0e12, 80),
    "H100": Device(989e12, 3.35e12, 80),
    "H200": Device(989e12, 4.8e12, 141),
    "B200": Device(2250e12, 8.0e12, 180),
    "L40S": Device(362e12, 0.864e12, 48),
    "L4": Device(121e12, 0.3e12, 24),
    "RTX 4090": Device(165e12, 1.01e12, 24),
}
"""bfloat16 tensor cores with float32 accumulation, without sparsity (NVIDIA's data sheets). An A100 of 40 GB has half
the memory."""
CPU_CORE = Device(90e9, 10e9, None, training_share=1.0)
"""A core of a server of 2022 to 2025 in float32: what a step of 93M parameters reached on an Intel Xeon (75e9) and an AMD EPYC
(130e9), attention, optimizer and all (docs/benchmarks.md)."""


def find_device(name: str) -> Device | None:
    """The GPU of the table whose name is the longest in the one that torch gives; None where there is none."""
    matching = [known for known in GPUS if known.lower() in name.lower()]
    return GPUS[max(matching, key=len)] if matching else None
