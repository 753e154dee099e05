"""Tensors and batches in Ray's object store, as numpy arrays: those are handed over without a
copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from rlflow.rollout.weights import mapped
from rlflow.types import Batch


def pack(value: Tensor) -> tuple[Any, str]:
    """(numpy array, torch dtype name); numpy has no bfloat16, so its bits travel as int16."""
    value = value.detach().cpu().contiguous()
    name = str(value.dtype).removeprefix("torch.")
    return (value.view(torch.int16) if value.dtype is torch.bfloat16 else value).numpy(), name


def unpack(packed: tuple[Any, str], copy: bool = True) -> Tensor:
    """What `pack` packed. copy: else it is a view of Ray's memory, which is only read."""
    array, name = packed
    value = torch.from_numpy(array.copy()) if copy else mapped(array)
    return value.view(torch.bfloat16) if name == "bfloat16" else value


class Parcels:
    """Batches for the ranks. Each tensor is put into Ray's object store once, whatever number of
    calls and ranks want it, as long as it lives and is not changed."""

    def __init__(self) -> None:
        self._stored = WeakTensorKeyDictionary()

    def send(self, batch: Batch) -> dict[str, Any]:
        """The fields that the batch has, by name, as references."""
        fields = {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}
        named = {**fields, **{f"extras.{name}": value for name, value in batch.extras.items()}}
        return {name: self._reference(value) for name, value in named.items()}

    def _reference(self, value: Tensor) -> Any:
        import ray

        version, reference = self._stored.get(value, (-1, None))
        if version != value._version:
            reference = ray.put(pack(value))
            self._stored[value] = (value._version, reference)
        return reference


def receive(sent: dict[str, Any]) -> Batch:
    """What `Parcels.send` sent, in Ray's memory: on one machine all ranks share it, and each copies
    what it selects, the rows that it works on."""
    import ray

    values = [unpack(packed, copy=False) for packed in ray.get(list(sent.values()))]
    named: dict[str, Any] = dict(zip(sent, values, strict=True))
    extras = {name: named.pop(name) for name in list(named) if name.startswith("extras.")}
    return Batch(
        **named, extras={name.removeprefix("extras."): value for name, value in extras.items()}
    )
