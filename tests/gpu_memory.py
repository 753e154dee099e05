"""Memory of a GPU that is not there: other processes open its buffers by the path of a file in place
of a CUDA IPC handle."""

from __future__ import annotations

import mmap
import os
from typing import Any

import torch

from rlflow.devices import gpu_buckets


def exported(buffer: torch.Tensor) -> gpu_buckets.Handles:
    """As of `gpu_buckets`: each process's buffers are on a GPU of their own, named by the rank."""
    fd, size = buffer.untyped_storage()._share_fd_cpu_()
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    # vLLM writes the number of its own GPU in place 6
    return {f"GPU-{rank}": (f"/proc/{os.getpid()}/fd/{fd}", size, None, None, None, None, 0)}


def opened(handle: Any) -> torch.Tensor:
    """The bytes (N,) of a buffer, shared."""
    with open(handle[0], "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), handle[1]), dtype=torch.uint8)


def stand_in(patch: Any = None) -> None:
    """Takes CUDA's place in `gpu_buckets`. patch: of pytest; none: for the rest of the process."""
    give = setattr if patch is None else patch.setattr
    give(gpu_buckets, "exported", exported)
    give(torch.cuda, "synchronize", lambda device: None)


def tensors_in(bucket: gpu_buckets.GpuBucket, gpu: str) -> dict[str, torch.Tensor]:
    """Copies of what a bucket has on one of its GPUs."""
    memory, start, found = opened(bucket.handles[gpu]), 0, {}
    for name, tensor in bucket.tensors.items():
        content = memory[start : start + tensor.nbytes].clone()
        found[name] = content.view(tensor.dtype).view(tensor.shape)
        start += tensor.nbytes
    return found
