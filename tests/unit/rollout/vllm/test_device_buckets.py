"""Weights that stay on the GPU: what the trainer packs and what vLLM is told about it is what vLLM's own transfer engine takes
apart, in vLLM's interpreter, out of memory of another process. Memory of a GPU is a file here (`tests/gpu_memory.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import subprocess
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlflow.devices.gpu_buckets import EMBEDDING, GpuBucket, GpuSharing, gpu_buckets, joined, merged
from rlflow.devices.gpu_plan import LOCAL, Bundle
from rlflow.errors import ConfigError, ModelError, RolloutError
from rlflow.models.huggingface import iterate_weights
from rlflow.rollout.tokenizer import Tokenizer
from rlflow.rollout.vllm import launch
from rlflow.rollout.vllm.buckets import HEAD, WeightNames
from rlflow.rollout.vllm.device_buckets import (
    DeviceCarrier,
    check_device_transfer,
    check_rank_transfer,
)
from rlflow.rollout.vllm.engines import make_vllm_engines
from rlflow.rollout.vllm.server import VLLMServer
from rlflow.rollout.vllm.vllm_engine import VLLMEngine
from tests import gpu_memory
from tests.fixtures import tiny_model
from tests.reference.trainer import ReferenceTrainer
from tests.unit.rollout.engine_contract import Pairs, run
from tests.unit.rollout.vllm.fake_server import FakeServed
from tests.unit.rollout.vllm.real import NEEDS_VLLM

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
SMALL = GpuSharing(64 << 10)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_memory.stand_in(monkeypatch)


async def one_by_one(buckets: Iterable[Any]) -> AsyncIterator[Any]:
    """As a sync gives them: up to the empty one."""
    for bucket in buckets:
        if not getattr(bucket, "tensors", True):
            return
        yield bucket


async def told(path: Path, buckets: Iterable[Any]) -> list[dict[str, Any]]:
    return [
        info async for info in DeviceCarrier().updates(one_by_one(buckets), WeightNames(path), 1)
    ]


@no_gpu
def test_without_a_gpu_it_is_refused_with_what_to_take(qwen: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"rollout\.engine\.transfer: 'ipc' needs a GPU .* take 'files'"
    ):
        make_vllm_engines(qwen, python="/nowhere", transfer="ipc")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((4, 0.0, 4), "the trainer on GPUs.*cluster.gpus_per_rank=1"),
        ((4, 1.0, 8), "a rank on each of the engines' 8 GPUs, found cluster.ranks=4"),
        ((8, 1.0, 8), None),
        ((8, 1.0, 4), None),
        ((0, 0.0, 1), None),
    ],
)
def test_ranks_that_have_no_memory_on_an_engines_gpu_are_refused(
    given: Any, message: str | None
) -> None:
    refused = pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext()
    with refused:
        check_rank_transfer(*given)


def test_a_gpus_memory_goes_to_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who opened it tells torch when it lets go: a second one would count as the first."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    first, other = Bundle(LOCAL, "0"), Bundle(LOCAL, "1")
    check_device_transfer([[first], [other]])
    with pytest.raises(ConfigError, match="to one engine, 2 are on GPU 0"):
        check_device_transfer([[first, other], [first]])


def test_tensors_in_the_hosts_memory_are_refused(qwen: Path) -> None:
    found = r"in the host's memory; set rollout\.engine\.transfer=files"
    with pytest.raises(RolloutError, match=found):
        list(gpu_buckets(iterate_weights(qwen), SMALL))
    with pytest.raises(RolloutError, match=r"'\S+' came as a tensor; expected .*gpu_weights"):
        asyncio.run(told(qwen, iterate_weights(qwen)))


def test_handles_of_a_tensor_parallel_engines_gpus_are_merged_by_the_gpus_ids() -> None:
    one, other = {"GPU-1": ("a",)}, {"GPU-2": ("b",)}
    assert merged([one, other]) == {"GPU-1": ("a",), "GPU-2": ("b",)}
    with pytest.raises(RolloutError, match="two buffers on GPU GPU-1"):
        merged([one, one])


def test_the_device_stands_where_vllm_writes_its_own() -> None:
    """vLLM puts the number of its own GPU in place 6 of the arguments that open a buffer."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    assert list(inspect.signature(rebuild_cuda_tensor).parameters)[6] == "storage_device"


def test_buckets_are_bounded_and_the_embedding_of_a_tied_model_is_told_as_its_head(
    tmp_path: Path, memory: None
) -> None:
    path = tiny_model(tmp_path / "tied", tied=True, tokenizer=False)
    pairs = sorted(iterate_weights(path), reverse=True)  # the embedding comes in the middle
    found = list(gpu_buckets(pairs, SMALL))
    assert found.pop() == GpuBucket({}, {}) and len(found) > 3
    assert all(one.nbytes <= SMALL.bucket_bytes or len(one.tensors) == 1 for one in found)
    infos = asyncio.run(told(path, gpu_buckets(pairs, SMALL)))
    names = [name for info in infos for name in info["names"]]
    assert sorted(names) == sorted([*dict(pairs), HEAD])
    at = next(number for number, info in enumerate(infos) if info["names"] == [HEAD])
    assert (
        infos[at - 1]["names"][0] == EMBEDDING
        and infos[at]["shapes"] == infos[at - 1]["shapes"][:1]
    )
    assert infos[at]["ipc_handles_pickled"] == infos[at - 1]["ipc_handles_pickled"]


@pytest.mark.parametrize("tied", [False, True])
def test_an_engine_reads_what_the_trainer_packed(
    tied: bool, tmp_path: Path, tokenizer: Tokenizer, memory: None
) -> None:
    path = tiny_model(tmp_path / "model", tied=tied, tokenizer=False)
    other = ReferenceTrainer(tiny_model(tmp_path / "other", tied=tied, tokenizer=False, seed=1))
    served = FakeServed(path)
    server = VLLMServer("buckets", connections=1, url=served.url)
    engine = VLLMEngine(
        path, tokenizer, server, lambda _: DeviceCarrier(), max_concurrency=1, sharing=SMALL
    )

    async def load(buckets: Iterator[GpuBucket], version: int) -> None:
        await engine.load_weights(one_by_one(buckets), version)

    try:
        engine.wait_until_ready()
        run(load(other.gpu_weights(SMALL), 1))
        sent = dict(other.weights())
        sent[HEAD] = sent.get(HEAD, sent[EMBEDDING])
        assert served.told == {name: value.numpy().tobytes() for name, value in sent.items()}
        assert engine.version == 1
        with pytest.raises(ModelError, match=r"1 of \d+ tensors did not arrive: model\.norm"):
            rest: Pairs = [pair for pair in other.weights() if pair[0] != "model.norm.weight"]
            run(load(gpu_buckets(rest, SMALL), 2))
    finally:
        engine.kill()
        served.close()


THERE = """
import json, mmap, sys, types
import torch
from safetensors.torch import save_file
from vllm import AsyncEngineArgs
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer import ipc_engine
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

folder, opened, found = sys.argv[1], [], {}

def rebuild(path, size, *rest):  # in the place of CUDA's
    opened.append(rest[4])
    with open(path, "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)

torch.multiprocessing.reductions.rebuild_cuda_tensor = ipc_engine.rebuild_cuda_tensor = rebuild
torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(uuid="GPU-1")
kind = WeightTransferEngineFactory._registry[WeightTransferConfig(backend="ipc").backend]()
engine = object.__new__(kind)  # without a model: its tensors are kept as they come
engine.device, engine._packed_importer = types.SimpleNamespace(index=5), ipc_engine.PackedBufferImporter()
engine.model = types.SimpleNamespace(load_weights=lambda weights: found.update(weights))
engine.init_transfer_engine(kind.init_info_cls(**WeightTransferInitRequest(init_info={"packed": True}).init_info))
for line in sys.stdin:
    request = WeightTransferUpdateRequest(update_info=json.loads(line))
    engine.receive_weights(kind.update_info_cls(**request.update_info))
    print("read", flush=True)
save_file({name: tensor.contiguous() for name, tensor in found.items()}, folder + "/found.safetensors")
json.dump({"engine": kind.__name__, "opened": opened}, open(folder + "/told.json", "w"))
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.slow
@NEEDS_VLLM[2]
def test_vllms_own_engine_takes_apart_what_two_gpus_have(
    dtype: torch.dtype, tmp_path: Path, memory: None
) -> None:
    """Of the handles it takes those of its own GPU, once for all buckets in the same buffer."""
    path = tiny_model(tmp_path / "tied", tied=True, tokenizer=False)
    tensors = {name: tensor.to(dtype) for name, tensor in iterate_weights(path)}
    zeros = ((name, torch.zeros_like(tensor)) for name, tensor in tensors.items())
    how = GpuSharing(max(tensor.nbytes for tensor in tensors.values()))

    def of_ranks() -> Iterator[GpuBucket]:
        for one, other in zip(
            gpu_buckets(zeros, how), gpu_buckets(tensors.items(), how), strict=True
        ):
            moved = {name.replace("0", "1"): handle for name, handle in other.handles.items()}
            yield joined([one, GpuBucket(other.tensors, moved)])

    python = launch.find_python(None)
    environment = {
        **launch.Launch(python, {}).environment(tmp_path),
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    process = subprocess.Popen(
        [python, "-c", THERE, str(tmp_path)], env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None

    async def send() -> int:
        count = 0
        async for info in DeviceCarrier().updates(one_by_one(of_ranks()), WeightNames(path), 1):
            process.stdin.write(json.dumps(info) + "\n")
            process.stdin.flush()
            while (said := process.stdout.readline()) != "read\n":
                assert said, "it has ended"
            count += 1
        return count

    try:
        assert asyncio.run(send()) > 2
        process.stdin.close()
        assert process.wait(60) == 0
    finally:
        process.kill()
    there = json.loads((tmp_path / "told.json").read_text())
    assert there == {"engine": "IPCWeightTransferEngine", "opened": [5]}
    found, sent = load_file(tmp_path / "found.safetensors"), {**tensors, HEAD: tensors[EMBEDDING]}
    assert set(found) == set(sent)
    assert all(found[name].dtype == dtype and torch.equal(found[name], sent[name]) for name in sent)
