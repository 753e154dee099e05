"""Which GPUs engines get, and what cannot be."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlflow.devices import gpu_plan
from rlflow.devices.gpu_plan import Bundle, visible_gpus
from rlflow.errors import ConfigError
from rlflow.rollout.vllm import engines
from rlflow.rollout.vllm.devices import check_memory, engine_devices
from rlflow.rollout.vllm.launch import Launch


def names(found: list[list[Bundle]]) -> list[list[str]]:
    return [[gpu.gpu for gpu in seen] for seen in found]


@pytest.mark.parametrize(
    ("variable", "count", "seen"),
    [(None, 3, ["0", "1", "2"]), ("2,GPU-8a", 8, ["2", "GPU-8a"]), ("", 8, []), ("-1", 8, []),
     ("3, 1,-1,2", 4, ["3", "1"]), (None, 0, []), ("0,1", 0, [])],
)  # fmt: skip
def test_the_gpus_that_a_process_sees(variable: str | None, count: int, seen: list[str]) -> None:
    found = visible_gpus({} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}, count)
    assert [gpu.gpu for gpu in found] == seen
    assert [gpu.number for gpu in found] == list(range(len(seen)))


@pytest.mark.parametrize(
    ("shown", "listed", "count"), [(1, 8, 1), (0, 8, 8), (2, None, 2), (0, None, 0)]
)
def test_gpus_are_those_that_cuda_shows_and_the_machines_for_a_torch_without_it(
    shown: int, listed: int | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that shows one GPU of eight was given engines on all eight."""

    def listdir(folder: str) -> list[str]:
        assert folder == "/proc/driver/nvidia/gpus"
        if listed is None:
            raise FileNotFoundError(folder)
        return [f"0000:0{number}:00.0" for number in range(listed)]

    monkeypatch.setattr("torch.cuda.device_count", lambda: shown)
    monkeypatch.setattr(gpu_plan, "os", SimpleNamespace(listdir=listdir))
    assert gpu_plan.gpu_count() == count


def test_engine_i_has_the_gpus_from_i_times_tensor_parallel_on() -> None:
    gpus = visible_gpus({"CUDA_VISIBLE_DEVICES": "7,6,5,4,3"}, 8)
    assert names(engine_devices(3, gpus=gpus)) == [["7"], ["6"], ["5"]]
    assert names(engine_devices(2, 2, gpus=gpus)) == [["7", "6"], ["5", "4"]]
    assert names(engine_devices(3, 2, gpus=gpus)) == [["7", "6"], ["5", "4"], ["7", "6"]]
    assert engine_devices(4, 2, gpus=[]) == []
    with pytest.raises(ConfigError, match=r"an engine needs 6 GPUs, this process sees 5"):
        engine_devices(1, 6, gpus=gpus)


def test_devices_that_are_named_for_each_engine_are_taken() -> None:
    gpus = visible_gpus({"CUDA_VISIBLE_DEVICES": "7,6"}, 8)
    found = engine_devices(2, 1, [["6"], ["3"]], gpus)
    assert [(gpu.gpu, gpu.number) for (gpu,) in found] == [("6", 1), ("3", -1)]
    with pytest.raises(
        ConfigError, match=r"expected 2 GPUs for each of 2 engines, found \[\['6'\]"
    ):
        engine_devices(2, 2, [["6"], ["7"]], gpus)


def test_engines_that_do_not_fit_on_a_gpu_together_are_refused() -> None:
    gpus = visible_gpus({}, 2)
    check_memory(engine_devices(4, gpus=gpus), 0.5)
    check_memory(engine_devices(2, gpus=gpus), None)
    check_memory([], 1.0)
    with pytest.raises(
        ConfigError, match=r"2 engines on GPU 0 take 0\.6 of its memory each, 1\.2 "
    ):
        check_memory(engine_devices(4, gpus=gpus), 0.6)
    with pytest.raises(ConfigError, match=r"2 engines on GPU 0 .* at most 0\.50"):
        check_memory(engine_devices(3, gpus=gpus), None)


@pytest.mark.parametrize(
    ("tensor_parallel", "expected"), [(1, ["3", "2", "1", "0"]), (2, ["3,2", "1,0"])]
)
def test_each_engine_is_started_with_its_own_gpus_cache_and_random_numbers(
    qwen: Path, monkeypatch: pytest.MonkeyPatch, tensor_parallel: int, expected: list[str]
) -> None:
    """All engines were started on GPU 0."""
    found: list[Launch] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,2,1,0")
    monkeypatch.setattr(gpu_plan, "gpu_count", lambda: 4)
    monkeypatch.setattr(engines, "VLLMServer", lambda *_, launch, **__: found.append(launch))
    monkeypatch.setattr(engines, "VLLMEngine", lambda *_, **__: None)
    monkeypatch.setattr(engines, "_all_ready", list)
    count = len(expected)
    engines.make_vllm_engines(
        qwen, python=sys.executable, engines=count, tensor_parallel=tensor_parallel
    )
    variables = [one.environment(Path("/x")) for one in found]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in variables] == expected
    assert len({one["VLLM_CACHE_ROOT"] for one in variables}) == count
    assert len({one.options["seed"] for one in found}) == count
    for gpu in ("1", "2"):  # workers of a machine, each in a process of its own
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpu)
        engines.make_vllm_engines(qwen, python=sys.executable)
    roots = [one.environment(Path("/x"))["VLLM_CACHE_ROOT"] for one in found]
    assert len(set(roots)) == count + 2
