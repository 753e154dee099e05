"""New weights to a vLLM on the same GPU: packed there, and opened by vLLM's processes through a CUDA IPC handle.

Nothing goes through the host's memory but names and shapes. What is sent is what vLLM's own `IPCWeightTransferEngine` takes in
packed form (vLLM 0.32, vllm/distributed/weight_transfer/ipc_engine.py), written with torch alone: vLLM is not imported here."""

from __future__ import annotations

import base64
import pickle
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlflow.errors import ConfigError, RolloutError
from rlflow.rollout.engine import Weights
from rlflow.rollout.vllm.buckets import WeightNames, with_head


def check_device_transfer(processes: int = 0) -> None:
    """Raises ConfigError where weights cannot go by CUDA IPC. processes: of trainer ranks and rollout workers."""
    if not torch.cuda.is_available():
        raise ConfigError("rollout.engine.transfer: 'ipc' needs a GPU that trainer and vLLM share; take 'files'.")
    if processes:
        raise ConfigError(
            "rollout.engine.transfer: 'ipc' needs the trainer in the run's process; take 'files', or set cluster.ranks=0 and "
            "cluster.rollout_workers=0."
        )


class DeviceBuckets:
    """A buffer on the GPU that is filled and sent, one time after another, until all tensors of an update were in it."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._handle = ""

    def close(self) -> None:
        """Frees the buffer; vLLM has closed it by then."""
        self._buffer, self._handle = torch.empty(0, dtype=torch.uint8), ""
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()

    async def messages(self, weights: Weights, names: WeightNames) -> AsyncIterator[dict[str, Any]]:
        """Fields of one `update` after another, at most `limit_bytes` each (a larger tensor is alone). The buffer may be filled
        again when the next is asked for: vLLM has copied what was in it.

        Raises ModelError for a tensor that is none of the model's, RolloutError for one that is on no GPU."""
        held: dict[str, Tensor] = {}
        size = 0
        async for name, tensor in with_head(weights, names):
            if not tensor.is_cuda:
                raise RolloutError(f"weight sync: '{name}' is in the host's memory; set rollout.engine.transfer=files.")
            if held and size + tensor.nbytes > self._limit:
                yield {"info": self._packed(held, size)}
                held, size = {}, 0
            held[name] = tensor.detach()
            size += tensor.nbytes
        if held:
            yield {"info": self._packed(held, size)}

    def _packed(self, tensors: Mapping[str, Tensor], size: int) -> dict[str, Any]:
        if self._buffer.numel() < size:
            device = next(iter(tensors.values())).device
            self._buffer = torch.empty(max(size, self._limit), dtype=torch.uint8, device=device)
            self._handle = exported(self._buffer)  # once for a buffer: vLLM opens it once, and counts
        pack(tensors.values(), self._buffer)
        torch.cuda.synchronize(self._buffer.device)  # before another process reads it
        return update_info(tensors, self._handle)


def pack(tensors: Any, buffer: Tensor) -> None:
    """Writes the bytes of tensors one behind the other into a buffer (bytes,)."""
    start = 0
    for tensor in tensors:
        end = start + tensor.nbytes
        buffer[start:end].copy_(tensor.contiguous().view(-1).view(torch.uint8))
        start = end


def update_info(tensors: Mapping[str, Tensor], handle: str) -> dict[str, Any]:
    """Keywords of vLLM's `IPCWeightTransferUpdateInfo` for tensors that `pack` has written."""
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "tensor_sizes": [tensor.nbytes for tensor in tensors.values()],
        "ipc_handles_pickled": handle,
    }


def exported(buffer: Tensor) -> str:
    """What other processes open a GPU's buffer with, as vLLM takes it in a message: the arguments of torch's rebuilding function
    by the GPU's id."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(buffer)
    return pickled({str(torch.cuda.get_device_properties(buffer.device).uuid): arguments})


def pickled(handles: Mapping[str, Sequence[Any]]) -> str:
    """Handles as text."""
    return base64.b64encode(pickle.dumps(dict(handles))).decode()
