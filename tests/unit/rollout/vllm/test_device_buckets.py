"""Weights that stay on the GPU: what is packed and said about it is what vLLM's own transfer engine takes apart, in vLLM's
interpreter. The handle itself needs a GPU: how a buffer is opened by another process was never run."""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlflow.errors import ConfigError, RolloutError
from rlflow.models.huggingface import iterate_weights
from rlflow.rollout.vllm import launch
from rlflow.rollout.vllm.device_buckets import (
    DeviceCarrier,
    check_device_transfer,
    merged,
    pack,
    pickled,
    update_info,
)
from rlflow.rollout.vllm.engines import make_vllm_engines
from tests.unit.rollout.vllm.real import NEEDS_VLLM

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
HANDLE = ("GPU-1234", ("a", "tensor", "of", "torch", 0, "uint8", 0))
THERE = """
import inspect, json, sys
import torch
from safetensors.torch import save_file
from vllm import AsyncEngineArgs
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_consumer, unpack_tensor

folder = sys.argv[1]
engine = WeightTransferEngineFactory._registry[WeightTransferConfig(backend="ipc").backend]()
init = engine.init_info_cls(**WeightTransferInitRequest(init_info={"packed": True}).init_info)
info = json.load(open(folder + "/info.json"))
typed = engine.update_info_cls(**WeightTransferUpdateRequest(update_info=info).update_info)
packed = torch.frombuffer(bytearray(open(folder + "/buffer", "rb").read()), dtype=torch.uint8)
dtypes = [getattr(torch, name) for name in typed.dtype_names]  # as packed_ipc_consumer does
found = unpack_tensor(packed[: sum(typed.tensor_sizes)], typed.names, typed.shapes, dtypes, typed.tensor_sizes)
save_file({name: tensor.clone() for name, tensor in found}, folder + "/found.safetensors")
json.dump({
    "packed": init.packed, "handles": typed.ipc_handles, "engine": engine.__name__,
    "taken": list(inspect.signature(packed_ipc_consumer).parameters),
}, open(folder + "/told.json", "w"))
"""


@no_gpu
def test_without_a_gpu_it_is_refused_with_what_to_take(qwen: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"rollout\.engine\.transfer: 'ipc' needs a GPU .* take 'files'"
    ):
        make_vllm_engines(qwen, python="/nowhere", transfer="ipc")


def test_ranks_and_workers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_device_transfer()
    with pytest.raises(
        ConfigError, match=r"needs the trainer in the run's process.*cluster\.ranks=0"
    ):
        check_device_transfer(2)


def test_a_tensor_in_the_hosts_memory_is_named(qwen: Path) -> None:
    with pytest.raises(
        RolloutError, match=r"is in the host's memory; set rollout\.engine\.transfer=files"
    ):
        asyncio.run(DeviceCarrier(1 << 20).info(dict(iterate_weights(qwen))))


def test_handles_of_a_tensor_parallel_engines_gpus_are_merged_by_the_gpus_ids() -> None:
    one, other = {"GPU-1": ("a",)}, {"GPU-2": ("b",)}
    assert merged([one, other]) == {"GPU-1": ("a",), "GPU-2": ("b",)}
    with pytest.raises(RolloutError, match="two buffers on GPU GPU-1"):
        merged([one, one])


def test_the_device_stands_where_vllm_writes_its_own() -> None:
    """vLLM puts the number of its own GPU in place 6 of the arguments that open a buffer."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    assert list(inspect.signature(rebuild_cuda_tensor).parameters)[6] == "storage_device"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.slow
@NEEDS_VLLM[2]
def test_vllms_own_engine_takes_apart_what_is_packed(
    dtype: torch.dtype, qwen: Path, tmp_path: Path
) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in iterate_weights(qwen)}
    buffer = torch.full(
        (sum(tensor.nbytes for tensor in tensors.values()) + 100,), 7, dtype=torch.uint8
    )
    pack(tensors.values(), buffer)
    info = update_info(tensors, pickled(dict([HANDLE])))
    (tmp_path / "buffer").write_bytes(buffer.numpy().tobytes())
    (tmp_path / "info.json").write_text(json.dumps(info))
    python = launch.find_python(None)
    environment = {
        **launch.Launch(python, {}).environment(tmp_path),
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    subprocess.run([python, "-c", THERE, str(tmp_path)], check=True, env=environment, timeout=200)
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["engine"] == "IPCWeightTransferEngine" and told["packed"] is True
    assert told["handles"] == {HANDLE[0]: list(HANDLE[1])}
    assert {"names", "shapes", "dtype_names", "tensor_sizes"} <= set(told["taken"])
    found = load_file(tmp_path / "found.safetensors")
    assert set(found) == set(tensors)
    assert all(
        found[name].dtype == dtype and torch.equal(found[name], tensor)
        for name, tensor in tensors.items()
    )
