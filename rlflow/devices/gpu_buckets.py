"""Weights on a trainer's GPUs for other processes, which open the memory by CUDA IPC handles.

Tensors are packed into a buffer on the GPU, one bucket after the other; nothing goes through the
host's memory but names and shapes. The form is that of vLLM's `IPCWeightTransferEngine` (vLLM 0.32,
vllm/distributed/weight_transfer/ipc_engine.py), written with torch alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlflow.errors import RolloutError

EMBEDDING = "model.embed_tokens.weight"
Handles = Mapping[str, Sequence[Any]]
"""By a GPU's id (uuid): the arguments of torch's rebuilding function."""


@dataclass(frozen=True)
class GpuSharing:
    """How an engine opens the trainer's memory. bucket_bytes: of a buffer. gpus: on which there is
    one, by their numbers in the trainer's process; none: the GPU that the weights are on."""

    bucket_bytes: int
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True)
class GpuBucket:
    """Tensors that lie one behind the other in a buffer, the same on each of one or several GPUs.
    tensors: by name, on torch's meta device, which has shapes and types alone. handles: of the
    buffers."""

    tensors: Mapping[str, Tensor]
    handles: Handles

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def gpu_buckets(weights: Iterable[tuple[str, Tensor]], how: GpuSharing) -> Iterator[GpuBucket]:
    """The (name, tensor) pairs in buckets of at most `how.bucket_bytes` (a larger tensor is alone);
    the embedding is the first in its own, so that it can be read as a tied head too.

    A bucket is written over when the next one is asked for. After the last comes one without
    tensors: whoever has it closes the iterator, which frees the buffers, once nobody reads them.
    Raises RolloutError for tensors that are on no GPU."""
    buffers = _Buffers(how)
    try:
        for name, tensor in weights:
            if not buffers.fits(tensor) or (name == EMBEDDING and buffers.tensors):
                yield buffers.bucket()
            buffers.add(name, tensor)
        if buffers.tensors:
            yield buffers.bucket()
        yield GpuBucket({}, {})
    finally:
        buffers.close()


def joined(parts: Sequence[GpuBucket]) -> GpuBucket:
    """One bucket of those that all ranks made of the same tensors. Raises RolloutError for two
    buffers on one GPU."""
    described = [[(n, t.shape, t.dtype) for n, t in part.tensors.items()] for part in parts]
    assert all(one == described[0] for one in described), "ranks packed different tensors"
    return GpuBucket(parts[0].tensors, merged(part.handles for part in parts))


class _Buffers:
    """A buffer on each GPU, that is filled again and again."""

    def __init__(self, how: GpuSharing) -> None:
        self._how = how
        self._buffers: list[Tensor] = []
        self._handles: Handles = {}
        self.tensors: dict[str, Tensor] = {}
        self._size = 0

    def fits(self, tensor: Tensor) -> bool:
        return not self.tensors or self._size + tensor.nbytes <= self._how.bucket_bytes

    def add(self, name: str, tensor: Tensor) -> None:
        """Writes the bytes of a tensor behind those that are there."""
        end = self._size + tensor.nbytes
        if not self._buffers or self._buffers[0].numel() < end:
            self._allocate(max(end, self._how.bucket_bytes), tensor.device)
        self._buffers[0][self._size : end].copy_(tensor.contiguous().view(-1).view(torch.uint8))
        self.tensors[name] = torch.empty_like(tensor, device="meta")
        self._size = end

    def bucket(self) -> GpuBucket:
        """What was added, on every GPU; the next `add` begins another one."""
        for buffer in self._buffers[1:]:
            buffer[: self._size].copy_(self._buffers[0][: self._size])
        for buffer in self._buffers:
            torch.cuda.synchronize(buffer.device)  # before another process reads it
        found, self.tensors, self._size = self.tensors, {}, 0
        return GpuBucket(found, self._handles)

    def close(self) -> None:
        """Frees the buffers."""
        self._buffers, self._handles = [], {}
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()

    def _allocate(self, size: int, own: torch.device) -> None:
        self.close()  # the smaller ones
        devices = [torch.device("cuda", gpu) for gpu in self._how.gpus] or [own]
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=one) for one in devices]
        # Once for a buffer: vLLM opens it once, and counts
        self._handles = merged(exported(buffer) for buffer in self._buffers)


def exported(buffer: Tensor) -> Handles:
    """What other processes open a GPU's buffer with. Raises RolloutError for one on no GPU."""
    from torch.multiprocessing.reductions import reduce_tensor

    if not buffer.is_cuda:
        raise RolloutError(
            "weight sync: the trainer's weights are in the host's memory; set "
            "rollout.engine.transfer=files."
        )
    _, arguments = reduce_tensor(buffer)
    return {str(torch.cuda.get_device_properties(buffer.device).uuid): arguments}


def merged(handles: Iterable[Handles]) -> Handles:
    """Handles of several GPUs' buffers that hold the same bytes: each of an engine's processes
    looks for its own GPU among them. Raises RolloutError for two of one GPU."""
    found: dict[str, Sequence[Any]] = {}
    for some in handles:
        if twice := found.keys() & some.keys():
            raise RolloutError(f"weight sync: two buffers on GPU {min(twice)}; expected one.")
        found |= some
    return found
