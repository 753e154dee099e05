"""Tensors and batches as numpy arrays, in which form Ray hands them over without a copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlflow.types import Batch


def pack(value: Tensor) -> tuple[Any, str]:
    """(numpy array, torch dtype name); numpy has no bfloat16, so its bits travel as int16."""
    value = value.detach().cpu().contiguous()
    name = str(value.dtype).removeprefix("torch.")
    return (value.view(torch.int16) if value.dtype is torch.bfloat16 else value).numpy(), name


def unpack(packed: tuple[Any, str]) -> Tensor:
    array, name = packed
    value = torch.from_numpy(array.copy())  # Ray's arrays are read-only views of shared memory
    return value.view(torch.bfloat16) if name == "bfloat16" else value


def pack_batch(batch: Batch) -> dict[str, Any]:
    """The fields that the batch has, by name."""
    fields = {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}
    extras = {name: pack(value) for name, value in batch.extras.items()}
    return {**{name: pack(value) for name, value in fields.items()}, "extras": extras}


def unpack_batch(packed: dict[str, Any]) -> Batch:
    """What `pack_batch` packed."""
    fields: dict[str, Any] = {name: unpack(value) for name, value in packed.items() if name != "extras"}
    return Batch(**fields, extras={name: unpack(value) for name, value in packed["extras"].items()})
