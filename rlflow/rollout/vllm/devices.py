"""GPUs of each engine of a process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rlflow.devices.gpu_plan import LOCAL, Bundle, plan, visible_gpus
from rlflow.errors import ConfigError
from rlflow.rollout.vllm.device_buckets import check_device_transfer, check_rank_transfer

UTILIZATION = 0.92
"""vLLM's default of gpu_memory_utilization (0.32): the share of a GPU's memory that it takes."""


def engine_devices(
    engines: int,
    tensor_parallel: int = 1,
    named: Sequence[Sequence[str]] | None = None,
    gpus: Sequence[Bundle] | None = None,
) -> list[list[Bundle]]:
    """For each engine its GPUs: those that are named for it, or of those that this process sees
    engine i has [i * tensor_parallel, (i + 1) * tensor_parallel), beginning anew where they are
    used up. [] on a machine without.

    Raises ConfigError where one engine needs more than there are, or has others named."""
    gpus = visible_gpus() if gpus is None else gpus
    if named is not None:
        if [len(names) for names in named] != [tensor_parallel] * engines:
            raise ConfigError(
                f"rollout.engine.devices: expected {tensor_parallel} GPUs for each of {engines} "
                f"engines, found {[list(names) for names in named]}."
            )
        known = {gpu.gpu: gpu for gpu in gpus}
        return [[known.get(name, Bundle(LOCAL, name)) for name in names] for names in named]
    if not gpus:
        return []
    if tensor_parallel > len(gpus):
        raise ConfigError(
            f"rollout.engine.tensor_parallel: an engine needs {tensor_parallel} GPUs, this process "
            f"sees {len(gpus)}; lower it, or show more in CUDA_VISIBLE_DEVICES."
        )
    found = plan(gpus, 0, engines, tensor_parallel, shared=True, again=True)
    return [list(places) for places in found.engines]


def check_memory(devices: Sequence[Sequence[Bundle]], utilization: float | None) -> None:
    """Raises ConfigError where engines that share a GPU take more than its memory. utilization:
    of each, a share; none: vLLM's default."""
    each = UTILIZATION if utilization is None else utilization
    engines = Counter(gpu for seen in devices for gpu in seen)
    for gpu, most in engines.most_common(1):
        if most * each > 1:
            raise ConfigError(
                f"rollout.engine: {most} engines on GPU {gpu.gpu} take {each:g} of its memory "
                f"each, {most * each:g} in all; lower rollout.engine.engines, or set "
                f"rollout.engine.arguments.gpu_memory_utilization to at most {1 / most:.2f}."
            )


def check_engine_devices(
    options: Mapping[str, Any], ranks: int, gpus_per_rank: float = 0.0
) -> None:
    """Raises ConfigError where engines of this process with these options cannot be: on the GPUs
    that there are, or with the trainer in so many ranks."""
    engines, each = options.get("engines", 1), options.get("tensor_parallel", 1)
    shared = options.get("transfer") == "ipc"
    if shared:
        check_device_transfer()
        check_rank_transfer(ranks, gpus_per_rank, engines * each)
    devices = engine_devices(engines, each)
    if shared:
        check_device_transfer(devices)
    check_memory(devices, (options.get("arguments") or {}).get("gpu_memory_utilization"))
