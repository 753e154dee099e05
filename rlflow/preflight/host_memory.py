"""Whether a run on CPU cores fits this machine's memory, and sizes for one that says none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from rlflow.config.loading import keys_set
from rlflow.config.schema import RunConfig, load_config
from rlflow.errors import ConfigError
from rlflow.preflight.estimates import (
    LIBRARIES,
    PhaseMemory,
    RunSizes,
    estimate,
    server_memory,
)
from rlflow.rollout.engine_facts import engine_facts

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
    in_process = engine_facts(config.rollout.engine).in_process
    if config.cluster.on_gpus or not in_process or not said.isdisjoint(CPU_SIZES):
        return config, ""
    sizes = [f"{key}={value}" for key, value in CPU_SIZES.items()]
    note = f"no GPU, and no size is set: {' '.join(sizes)}, sizes for CPU cores"
    return load_config(path, [*sizes, *overrides], preset), note


def host_memory(sizes: RunSizes, host_size: int) -> list[PhaseMemory]:
    """What all processes of a run hold together in this machine's memory of `host_size` bytes, by
    phase; [] for a run on GPUs, and for one on other machines."""
    cluster = sizes.cluster
    if cluster.on_gpus or cluster.address is not None:
        return []
    phases = estimate(sizes, free=engine_room(sizes, host_size))
    beside = {
        f"{phase.process}: {name}": size * sizes.engine.count
        for phase in server_memory(sizes)
        for name, size in phase.parts.items()
    }
    if not cluster.ranks:
        return [
            PhaseMemory(phase.process, phase.phase, {**phase.parts, **beside}) for phase in phases
        ]
    driver, *ranks = phases
    workers = max(1, cluster.rollout_workers)
    for name, size in driver.parts.items():
        beside[name] = beside.get(name, 0) + size * workers
    ranks_of_a_stage = cluster.ranks // sizes.trainer.pipeline_parallel
    for phase in ranks:
        for name, size in phase.parts.items():
            beside[name] = beside.get(name, 0) + size * ranks_of_a_stage
    return [PhaseMemory("all processes", "update", beside)]


def engine_room(sizes: RunSizes, host_size: int) -> int:
    """Bytes of `host_size` that an engine in the run's process finds free when it sizes its keys
    and values."""
    weights = sizes.engine.memory(sizes.engine_load).get("engine's weights", 0)
    return max(0, host_size - LIBRARIES - weights)


def check_host_memory(sizes: RunSizes, host_size: int | None = None) -> None:
    """Raises ConfigError where the processes of a run hold more than this machine has, or one of
    `host_size` bytes."""
    host_size = host_bytes() if host_size is None else host_size
    phases = host_memory(sizes, host_size)
    if not phases:
        return
    largest = max(phases, key=lambda phase: phase.total)
    if largest.total > host_size:
        posts = sorted(largest.parts.items(), key=lambda part: -part[1])
        named = [
            f"{name} {part / GIB:.1f} (lowered by {LOWERED_BY[name]})"
            for name, part in posts
            if name in LOWERED_BY
        ]
        raise ConfigError(
            f"memory: {largest.process}, {largest.phase}: about {largest.total / GIB:.1f} GiB are "
            f"needed, this machine has {host_size / GIB:.1f}. The largest posts: "
            f"{'; '.join(named[:POSTS_NAMED])}. Fewer episodes at a time, by "
            "rollout.prompts_per_step or rollout.samples_per_prompt, lower them too."
        )
