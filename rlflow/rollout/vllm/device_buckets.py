"""New weights to a vLLM on the trainer's GPUs: packed there, and opened by vLLM's processes through
CUDA IPC handles.

Nothing goes through the host's memory but names and shapes. What is sent is what vLLM's own
`IPCWeightTransferEngine` takes in packed form (vLLM 0.32,
vllm/distributed/weight_transfer/ipc_engine.py), written with torch alone: vLLM is not imported
here."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlflow.errors import ConfigError, RolloutError
from rlflow.rollout.vllm.buckets import Bucket

Handles = Mapping[str, Sequence[Any]]
"""By a GPU's id (uuid): the arguments of torch's rebuilding function."""


def check_device_transfer(processes: int = 0) -> None:
    """Raises ConfigError where weights cannot go by CUDA IPC. processes: of trainer ranks and
    rollout workers."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "rollout.engine.transfer: 'ipc' needs a GPU that trainer and vLLM share; take 'files'."
        )
    if processes:
        raise ConfigError(
            "rollout.engine.transfer: 'ipc' needs the trainer in the run's process; take 'files', "
            "or set cluster.ranks=0 and cluster.rollout_workers=0."
        )


class DeviceCarrier:
    """A buffer on each of an engine's GPUs that is filled and sent, one time after another. gpus:
    their numbers in this process; none: the GPU that the tensors are on."""

    def __init__(self, limit_bytes: int, gpus: Sequence[int] = ()) -> None:
        self._limit, self._gpus = limit_bytes, gpus
        self._buffers: list[Tensor] = []
        self._handles = ""

    def close(self) -> None:
        """Frees the buffers; vLLM has closed them by then."""
        self._buffers, self._handles = [], ""
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()

    async def info(self, bucket: Bucket) -> dict[str, Any]:
        """Keywords of vLLM's `IPCWeightTransferUpdateInfo`. The buffers may be filled again when
        `info` is called again: vLLM has copied what was in them.

        Raises RolloutError for a tensor that is on no GPU."""
        for name, tensor in bucket.items():
            if not tensor.is_cuda:
                raise RolloutError(
                    f"weight sync: '{name}' is in the host's memory; set "
                    "rollout.engine.transfer=files."
                )
        size = sum(tensor.nbytes for tensor in bucket.values())
        if not self._buffers or self._buffers[0].numel() < size:
            own = next(iter(bucket.values())).device
            devices = [torch.device("cuda", gpu) for gpu in self._gpus] or [own]
            capacity = max(size, self._limit)
            self._buffers = [
                torch.empty(capacity, dtype=torch.uint8, device=device) for device in devices
            ]
            # Once for a buffer: vLLM opens it once, and counts
            self._handles = pickled(merged(exported(buffer) for buffer in self._buffers))
        pack(bucket.values(), self._buffers[0])
        for buffer in self._buffers[1:]:
            buffer[:size].copy_(self._buffers[0][:size])
        for buffer in self._buffers:
            torch.cuda.synchronize(buffer.device)  # before another process reads it
        return update_info(bucket, self._handles)


def pack(tensors: Iterable[Tensor], buffer: Tensor) -> None:
    """Writes the bytes of tensors one behind the other into a buffer (bytes,)."""
    start = 0
    for tensor in tensors:
        end = start + tensor.nbytes
        buffer[start:end].copy_(tensor.contiguous().view(-1).view(torch.uint8))
        start = end


def update_info(tensors: Mapping[str, Tensor], handles: str) -> dict[str, Any]:
    """Keywords of vLLM's `IPCWeightTransferUpdateInfo` for tensors that `pack` has written."""
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "tensor_sizes": [tensor.nbytes for tensor in tensors.values()],
        "ipc_handles_pickled": handles,
    }


def exported(buffer: Tensor) -> Handles:
    """What other processes open a GPU's buffer with."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(buffer)
    return {str(torch.cuda.get_device_properties(buffer.device).uuid): arguments}


def merged(handles: Iterable[Handles]) -> Handles:
    """Handles of several GPUs' buffers that hold the same bytes: each of a tensor-parallel engine's
    processes looks for its own GPU among them. Raises RolloutError for two of one GPU."""
    found: dict[str, Sequence[Any]] = {}
    for some in handles:
        if twice := found.keys() & some.keys():
            raise RolloutError(f"weight sync: two buffers on GPU {min(twice)}; expected one.")
        found |= some
    return found


def pickled(handles: Handles) -> str:
    """Handles as text, as vLLM takes them in a message."""
    return base64.b64encode(pickle.dumps(dict(handles))).decode()
