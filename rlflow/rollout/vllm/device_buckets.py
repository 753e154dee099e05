"""New weights to a vLLM on the trainer's GPUs, whose processes open the trainer's memory
(`rlflow.devices.gpu_buckets`). vLLM is not imported here."""

from __future__ import annotations

import base64
import pickle
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlflow.devices.gpu_buckets import EMBEDDING, GpuBucket
from rlflow.devices.gpu_plan import Bundle
from rlflow.errors import ConfigError, RolloutError
from rlflow.rollout.engine import Weights, each_weight
from rlflow.rollout.vllm.buckets import HEAD, WeightNames


def check_device_transfer(devices: Sequence[Sequence[Bundle]] = ()) -> None:
    """Raises ConfigError where weights cannot go by CUDA IPC. devices: of each engine."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "rollout.engine.transfer: 'ipc' needs a GPU that trainer and vLLM share; take 'files'."
        )
    engines = Counter(gpu for seen in devices for gpu in seen)
    for gpu, count in engines.items():
        if count > 1:
            raise ConfigError(
                f"rollout.engine.transfer: 'ipc' hands a GPU's memory to one engine, {count} are "
                f"on GPU {gpu.gpu}; take 'files', or lower rollout.engine.engines."
            )


def check_rank_transfer(ranks: int, gpus_per_rank: float, needed: int) -> None:
    """Raises ConfigError where trainer ranks cannot hand their memory to engines. needed: GPUs of
    all engines."""
    if ranks and not gpus_per_rank:
        raise ConfigError(
            "rollout.engine.transfer: 'ipc' needs the trainer on GPUs; take 'files', or set "
            "cluster.gpus_per_rank=1."
        )
    if ranks and needed > ranks:
        raise ConfigError(
            f"rollout.engine.transfer: 'ipc' needs a rank on each of the engines' {needed} GPUs, "
            f"found cluster.ranks={ranks}; take 'files', or lower rollout.engine.engines."
        )


class DeviceCarrier:
    """Tells vLLM of each `GpuBucket` that comes: the trainer has packed it."""

    async def updates(
        self, weights: Weights, names: WeightNames, limit_bytes: int
    ) -> AsyncIterator[dict[str, Any]]:
        """Keywords of vLLM's `IPCWeightTransferUpdateInfo`. vLLM has copied what is in a bucket
        before the next is asked for. Raises RolloutError for weights that come as tensors."""
        sent = set[str]()
        async for bucket in each_weight(weights):
            if not isinstance(bucket, GpuBucket):
                raise RolloutError(
                    f"weight sync: '{bucket[0]}' came as a tensor; expected the buckets of "
                    "Trainer.gpu_weights; or set rollout.engine.transfer=files."
                )
            pickled = pickle.dumps(dict(bucket.handles))
            handles = base64.b64encode(pickled).decode()  # as vLLM takes them in a message
            for name, tensor in bucket.tensors.items():
                names.check(name, tensor, sent)
                sent.add(name)
            yield update_info(bucket.tensors, handles)
            if names.tied and next(iter(bucket.tensors)) == EMBEDDING:
                sent.add(HEAD)
                yield update_info({HEAD: bucket.tensors[EMBEDDING]}, handles)
        names.check_complete(sent)

    def close(self) -> None:
        """The trainer frees its memory by itself."""


def update_info(tensors: Mapping[str, Tensor], handles: str) -> dict[str, Any]:
    """Keywords of vLLM's `IPCWeightTransferUpdateInfo` for the first tensors of a bucket."""
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "tensor_sizes": [tensor.nbytes for tensor in tensors.values()],
        "ipc_handles_pickled": handles,
    }
