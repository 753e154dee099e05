"""Tensors and batches in Ray's object store, as numpy arrays: those are handed over without a
copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from rlflow.rollout.weights import mapped
from rlflow.types import Batch

References = dict[str, Any]
"""Of tensors in Ray's object store, by name."""


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

    def send(self, batch: Batch) -> tuple[References, References]:
        """The fields that the batch has, and its extras."""
        return self._references(vars(batch)), self._references(batch.extras)

    def _references(self, values: Mapping[str, Any]) -> References:
        import ray

        found = {}
        for name, value in values.items():
            if isinstance(value, Tensor):
                version, found[name] = self._stored.get(value, (-1, None))
                if version != value._version:
                    found[name] = ray.put(pack(value))
                    self._stored[value] = (value._version, found[name])
        return found


def receive(sent: tuple[References, References]) -> Batch:
    """What `Parcels.send` sent, in Ray's memory: on one machine all ranks share it, and each copies
    what it selects, the rows that it works on."""
    import ray

    def values(some: References) -> dict[str, Any]:
        packed = zip(some, ray.get(list(some.values())), strict=True)
        return {name: unpack(one, copy=False) for name, one in packed}

    fields, extras = map(values, sent)
    return Batch(**fields, extras=extras)
