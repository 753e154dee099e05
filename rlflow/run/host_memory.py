"""Whether a run on CPU cores fits this machine's memory, and sizes for one that says none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from rlflow.config.loading import keys_set
from rlflow.config.schema import RunConfig, load_config
from rlflow.errors import ConfigError
from rlflow.models.architecture import Architecture
from rlflow.run.estimates import (
    LIBRARIES,
    PhaseMemory,
    engine_parts,
    estimate,
    is_embedded,
    on_gpus,
    vllm_memory,
)

GIB = 2**30
CPU_SIZES = {
    "rollout.prompts_per_step": 8,
    "rollout.samples_per_prompt": 4,
    "rollout.max_response_tokens": 256,
    "rollout.max_total_tokens": 1024,
    "trainer.tokens_per_microbatch": 2048,
}
"""In place of the defaults, which are a GPU's, where a run on CPU cores says nothing of its size."""
LOWERED_BY = {
    "keys and values": "rollout.engine.kv_tokens or rollout.max_total_tokens",
    "sampling": "rollout.engine.max_concurrency or rollout.engine.prefill_tokens",
    "activations": "trainer.tokens_per_microbatch, or by trainer.recompute=full",
    "backward pass": "trainer.tokens_per_microbatch",
    "logits": "trainer.logits_chunk_mib",
    "reference, teacher": "trainer.lora, whose reference is the model itself",
    "optimizer": "trainer.lora",
    "gradients": "trainer.lora",
    "weights": "a smaller model or model.dtype=bfloat16",
    "engine's weights": "a smaller model or model.dtype=bfloat16",
}
"""Part of the memory -> what lowers it."""
POSTS_NAMED = 3
CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_bytes() -> int:
    """Memory of this machine, or of the container that this process is in."""
    size = psutil.virtual_memory().total
    for file in map(Path, CONTAINER_LIMITS):
        if file.is_file() and (limit := file.read_text().strip()).isdecimal():
            size = min(size, int(limit))
    return size


def sized_config(
    path: str | Path | Mapping[str, Any] | None,
    overrides: Sequence[str],
    preset: str | None = None,
) -> tuple[RunConfig, str]:
    """The configuration, and a note where CPU_SIZES stand in it: the run is on CPU cores, and
    neither file, preset nor overrides say any of them."""
    config = load_config(path, overrides, preset)
    said = keys_set(path, overrides, RunConfig, preset)
    if on_gpus(config) or not is_embedded(config) or not said.isdisjoint(CPU_SIZES):
        return config, ""
    sizes = [f"{key}={value}" for key, value in CPU_SIZES.items()]
    note = f"no GPU, and no size is set: {' '.join(sizes)}, sizes for CPU cores"
    return load_config(path, [*sizes, *overrides], preset), note


def host_memory(config: RunConfig, model: Architecture, size: int) -> list[PhaseMemory]:
    """What all processes of a run hold together in this machine's memory of `size` bytes, by phase;
    [] for a run on GPUs, and for one on other machines."""
    if on_gpus(config) or config.cluster.address is not None:
        return []
    phases = estimate(config, model, free=engine_room(config, model, size))
    engines = int(config.rollout.engine.get("engines", 1))
    beside = {
        f"{phase.process}: {name}": size * engines
        for phase in vllm_memory(config, model)
        for name, size in phase.parts.items()
    }
    if not config.cluster.ranks:
        return [_with(phase, beside) for phase in phases]
    driver, *ranks = phases
    workers = max(1, config.cluster.rollout_workers)
    for name, size in driver.parts.items():
        beside[name] = beside.get(name, 0) + size * workers
    each = config.cluster.ranks // config.trainer.pipeline_parallel
    for phase in ranks:
        for name, size in phase.parts.items():
            beside[name] = beside.get(name, 0) + size * each
    return [PhaseMemory("all processes", "update", beside)]


def engine_room(config: RunConfig, model: Architecture, size: int) -> int:
    """Bytes of `size` that the embedded engine finds free when it sizes its keys and values."""
    weights = engine_parts(config, model).get("engine's weights", 0)
    return max(0, size - LIBRARIES - weights)


def check_host_memory(config: RunConfig, model: Architecture, size: int | None = None) -> None:
    """Raises ConfigError where the processes of a run hold more than this machine has, or one of
    `size` bytes."""
    size = host_bytes() if size is None else size
    phases = host_memory(config, model, size)
    if not phases:
        return
    largest = max(phases, key=lambda phase: phase.total)
    if largest.total > size:
        posts = sorted(largest.parts.items(), key=lambda part: -part[1])
        named = [
            f"{name} {part / GIB:.1f} (lowered by {LOWERED_BY[name]})"
            for name, part in posts
            if name in LOWERED_BY
        ]
        raise ConfigError(
            f"memory: {largest.process}, {largest.phase}: about {largest.total / GIB:.1f} GiB are "
            f"needed, this machine has {size / GIB:.1f}. The largest posts: "
            f"{'; '.join(named[:POSTS_NAMED])}. Fewer episodes at a time, by "
            "rollout.prompts_per_step or rollout.samples_per_prompt, lower them too."
        )


def _with(phase: PhaseMemory, beside: Mapping[str, int]) -> PhaseMemory:
    return PhaseMemory(phase.process, phase.phase, {**phase.parts, **beside})
