"""Memory of a run's GPUs: which rank and engines are on each, and whether it has room for them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping

import torch

from rlflow.cluster.placement import Placement
from rlflow.devices.gpu_plan import Bundle, GpuPlan, visible_gpus
from rlflow.errors import ConfigError
from rlflow.preflight.estimates import PhaseMemory, RunSizes, estimate, rank_phases
from rlflow.run.gpus import gpu_demand

GIB = 2**30
ASSUMED_GPU = 79 * GIB  # what CUDA shows of a card of 80 GB, where this machine has none


def gpu_bytes() -> int:
    """Memory of this machine's first GPU; without one, of a card of 80 GB."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    return ASSUMED_GPU


def gpu_phases(
    sizes: RunSizes, gpu_size: int, stage: int | None, engines: int
) -> dict[str, dict[str, int]]:
    """{phase: {part: bytes}} of one GPU of `gpu_size` bytes. stage: of the trainer rank there;
    None: no rank. engines: those there."""
    awake, asleep = (
        {name: engines * bytes_ for name, bytes_ in parts.items() if engines}
        for parts in sizes.engine.gpu_memory(gpu_size)
    )
    if stage is None:
        return {"rollout": awake}
    beside = asleep if sizes.engine_sleeps else awake
    phases = rank_phases(sizes, stage, awake, beside)
    embedding = sizes.model.vocab * sizes.model.hidden * sizes.width
    if engines and (buffer := sizes.engine.transfer_buffer(embedding)):
        name = f"weights to {sizes.engine.process}"
        phases["sync"] = {**phases["rollout"], name: buffer}
    return phases


def placed(sizes: RunSizes, placement: Placement | None = None) -> GpuPlan:
    """Which rank and engine have which GPU: where Ray has placed them, or else on this machine. On
    a cluster, or where there are too few, as if there were enough. Raises ConfigError."""
    demand = gpu_demand(sizes.cluster, sizes.engine)
    here = visible_gpus() if sizes.cluster.address is None else []
    enough = here if len(here) >= demand.least else []
    bundles = list(placement.bundles) if placement else enough
    wanted = demand.least if bundles else demand.most
    # On a cluster, wherever there is room
    bundles += [Bundle("any", str(number)) for number in range(len(bundles), wanted)]
    return demand.plan(bundles)


def roles(sizes: RunSizes, placement: Placement | None = None) -> list[tuple[int | None, int]]:
    """(pipeline stage of the trainer rank or None, engines there that take a share of it) of each
    GPU of the run."""
    plan = placed(sizes, placement)
    engines = Counter(itertools.chain(*plan.engines) if sizes.engine.own_gpus else ())
    # Ranks of a stage follow each other
    per_stage = plan.ranks // sizes.trainer.pipeline_parallel
    return [
        (gpu // per_stage if gpu < plan.ranks else None, engines[bundle])
        for gpu, bundle in enumerate(plan.bundles)
    ]


def gpu_table(sizes: RunSizes, placement: Placement | None = None) -> list[str]:
    """Lines that say which rank and engine have which GPU, and the memory planned on it; [] for a
    run without GPUs. placement: where Ray has placed them; None: as it would. Raises
    ConfigError."""
    if not sizes.cluster.on_gpus:
        return []
    return placed(sizes, placement).table(_planned_bytes(sizes, placement))


def _planned_bytes(sizes: RunSizes, placement: Placement | None) -> list[int]:
    """Of each GPU of the run, at the most; of the ranks' alone where engines take no share of
    any."""
    if sizes.engine.own_gpus:
        gpus = [gpu_phases(sizes, gpu_bytes(), *role) for role in roles(sizes, placement)]
        return [max(sum(parts.values()) for parts in phases.values()) for phases in gpus]
    phases = [phase for phase in estimate(sizes) if phase.process != "driver"]
    by_stage: dict[str, int] = {}
    for phase in phases:
        by_stage[phase.process] = max(phase.total, by_stage.get(phase.process, 0))
    ranks_of_a_stage = (sizes.cluster.ranks or 1) // len(by_stage)
    return [most for most in by_stage.values() for _ in range(ranks_of_a_stage)]


def gpu_memory(sizes: RunSizes, gpu_size: int) -> list[PhaseMemory]:
    """Every phase of GPUs of `gpu_size` bytes, those alike together; [] for a run without GPUs, and
    for one whose engines take no share of any. Raises ConfigError for a layout that the model
    cannot have."""
    if not (sizes.cluster.on_gpus and sizes.engine.own_gpus):
        return []
    sizes.layout.check_model(sizes.model)
    memory = []
    for (stage, engines), alike in itertools.groupby(
        enumerate(roles(sizes)), lambda numbered: numbered[1]
    ):
        name = _gpu_names([gpu for gpu, _ in alike])
        held = ["rank"] * (stage is not None) + [sizes.engine.process] * engines
        process = f"{name}: {' + '.join(held)}"
        phases = gpu_phases(sizes, gpu_size, stage, engines)
        memory += [PhaseMemory(process, phase, parts) for phase, parts in phases.items()]
    return memory


def _gpu_names(gpus: list[int]) -> str:
    return f"GPU {gpus[0]}" if len(gpus) == 1 else f"GPUs {gpus[0]} to {gpus[-1]}"


def check_gpu_memory(sizes: RunSizes) -> None:
    """Raises ConfigError where a GPU would have to hold more than it has."""
    gpu_size = gpu_bytes()
    memory = gpu_memory(sizes, gpu_size)
    if not memory:
        return
    largest = max(memory, key=lambda phase: phase.total)
    if largest.total > gpu_size:
        raise ConfigError(
            f"GPU memory: {largest.process}, {largest.phase}: about {largest.total / GIB:.1f} GiB "
            f"are needed, expected at most {gpu_size / GIB:.1f}: {_advice(sizes, largest.parts)}"
        )


def _advice(sizes: RunSizes, parts: Mapping[str, int]) -> str:
    share, (awake, _) = sizes.engine.gpu_share_key, sizes.engine.gpu_memory(0)
    if "activations" in parts:
        beside = f" or {share}" if awake.keys() <= parts.keys() else ""
        return (
            f"lower trainer.tokens_per_microbatch{beside}, set trainer.recompute or "
            "distributed_optimizer, or raise trainer.tensor_parallel."
        )
    return (
        f"lower {share}, set trainer.release_gradients or distributed_optimizer, or give the "
        "engines GPUs of their own."
    )
