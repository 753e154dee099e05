"""GPUs of a run: which rank and engine gets which, and whether each has the memory.

vLLM takes a share of the GPU whatever the model needs: for weights, keys and values, a step's
activations and, from 0.21 on, CUDA graphs; the context of its process comes beside it. Asleep it
keeps that context, its CUDA graphs and the buffers of its libraries."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rlflow.cluster.object_store import room_for
from rlflow.cluster.placement import Placement, own_node
from rlflow.config.schema import RunConfig
from rlflow.errors import ConfigError
from rlflow.gpu_plan import Bundle, GpuPlan, plan, visible_gpus
from rlflow.models.architecture import Architecture
from rlflow.models.huggingface import WeightFiles
from rlflow.rollout.vllm.devices import UTILIZATION
from rlflow.rollout.vllm.engines import VLLMOptions
from rlflow.run.estimates import (
    DTYPE_BYTES,
    PhaseMemory,
    engine_dtype,
    estimate,
    is_embedded,
    is_vllm,
    on_gpus,
    rank_phases,
    sleeps,
)

GIB = 2**30
ASSUMED_GPU = 79 * GIB  # what CUDA shows of a card of 80 GB, where this machine has none
VLLM_CONTEXT = 6 * GIB // 10
"""The CUDA context, there before vLLM counts its share (gpu_worker.py: init_device). Assumed."""
VLLM_ASLEEP, VLLM_ASLEEP_SPLIT = 25 * GIB // 10, 17 * GIB // 10
"""What stays on a GPU asleep, context included, and NCCL's buffers where an engine has several
GPUs: 0.8 and 2.4 GiB were seen of a 1B model without graphs (NVIDIA-NeMo/RL issue 223); graphs are
assumed."""
VERSIONS_STORED, BATCHES_BYTES = 3, 2**30


# ---------------------------------------------------------------- places


@dataclass(frozen=True)
class GpuDemand:
    """What a run puts on GPUs. ranks: of the trainer, 1 for one in this process. engines: of `each`
    GPUs. shared: they are on the ranks' GPUs. in_workers: each has a process of Ray's."""

    ranks: int
    engines: int
    each: int
    shared: bool
    in_workers: bool

    @property
    def most(self) -> int:
        """GPUs, where every engine has its own."""
        held = self.engines * self.each
        return max(self.ranks, held) if self.shared else self.ranks + held

    @property
    def least(self) -> int:
        """GPUs, where engines of this process share them."""
        one = min(self.engines, 1) * self.each
        return self.most if self.in_workers else max(self.ranks, one)

    def plan(self, bundles: Sequence[Bundle]) -> GpuPlan:
        """Raises ConfigError."""
        again = not self.in_workers  # vLLM says how much memory each takes
        return plan(bundles, self.ranks, self.engines, self.each, self.shared, again)


def gpu_demand(config: RunConfig) -> GpuDemand:
    """Of a run on GPUs. Engines in this process, and workers of a share of a GPU, are on the ranks'
    GPUs; other workers have GPUs of their own."""
    section, options = config.cluster, config.rollout.engine
    count = section.rollout_workers or int(options.get("engines", 1))
    beside = is_embedded(config) and section.address is None  # on the first GPU that it sees
    known = section.rollout_workers or is_vllm(config) or beside
    shared = not section.rollout_workers or 0 < section.gpus_per_rank < 1
    each = int(options.get("tensor_parallel") or 1)
    engines, in_workers = count if known else 0, section.rollout_workers > 0
    return GpuDemand(section.ranks or 1, engines, each, shared, in_workers)


def check_gpus(config: RunConfig) -> None:
    """Raises ConfigError for ranks, workers and engines that no placement could give their GPUs."""
    section = config.cluster
    asked = f"cluster.gpus_per_rank: found {section.gpus_per_rank:g}"
    if section.gpus_per_rank > 1:
        raise ConfigError(
            f"{asked}, expected at most 1: a rank uses one GPU, and a rollout worker as many as "
            "rollout.engine.tensor_parallel says by itself."
        )
    if section.rollout_workers and section.gpus_per_rank and not section.ranks:
        raise ConfigError(
            "cluster.ranks: found 0 with rollout workers on GPUs: Ray does not know of the GPU of "
            "a trainer in this process and gives it to a worker. Set cluster.ranks=1."
        )
    if section.ranks and 0 < section.gpus_per_rank < 1:
        if not section.rollout_workers and section.ranks > 1:
            raise ConfigError(
                f"{asked} for {section.ranks} ranks: two ranks cannot share a GPU (NCCL refuses "
                "it). Set 1; engines of this process are on the ranks' GPUs by themselves."
            )
        if section.rollout_workers and section.gpus_per_rank > 0.5:
            raise ConfigError(
                f"{asked}: a rank and a rollout worker of such a share each do not fit on one GPU. "
                "Set at most 0.5, or 1 for GPUs of their own."
            )
    if section.address is None and section.gpus_per_rank and section.ranks:
        gpu_demand(config).plan(visible_gpus())


def store_bytes(config: RunConfig) -> int:
    """What Ray's object store holds at a time: the two newest versions of the weights, what readers
    have of a third, and batches."""
    values = sum(map(math.prod, WeightFiles(config.model.path).shapes().values()))
    width = DTYPE_BYTES[config.model.dtype]
    if config.trainer.lora is not None:  # merged as the engines keep it
        width = max(width, DTYPE_BYTES[engine_dtype(config)])
    return VERSIONS_STORED * values * width + BATCHES_BYTES


def make_placement(config: RunConfig) -> Placement | None:
    """Ray with the ranks' GPUs or cores reserved, and GPUs of engines that share them; None for a
    run without ranks. The caller closes it. Raises ConfigError where the cluster cannot place
    them."""
    section = config.cluster
    if not section.ranks:
        return None
    demand, gpus = gpu_demand(config), section.gpus_per_rank > 0
    count, beside = section.ranks, False
    if gpus and demand.shared:
        beside = demand.in_workers
        there = demand.most if beside or section.address else len(visible_gpus())
        count = max(section.ranks, min(demand.most, there))
    placement = Placement(
        section.address,
        count,
        cpus=section.threads_per_rank * (1 + beside),
        gpus=gpus,
        more_cpus=section.rollout_workers * section.threads_per_rank,
        options=room_for(store_bytes(config)) if section.rollout_workers else None,
    )
    try:
        engine_gpus(config, placement)
    except BaseException:
        placement.close()
        raise
    return placement


def engine_gpus(config: RunConfig, placement: Placement | None) -> list[list[str]] | None:
    """The GPUs of each engine of this process, as CUDA_VISIBLE_DEVICES names them; None where
    nobody has placed them. Raises ConfigError for engines that cannot be where they would have to
    be."""
    demand = gpu_demand(config)
    if placement is None or not config.cluster.gpus_per_rank or not demand.shared:
        return None
    found = demand.plan(placement.bundles)
    here = placement.bundles[0].node
    far = {bundle.node for engine in found.engines for bundle in engine} - {
        here,
        own_node(),
    }
    if demand.in_workers:
        return None
    if far or (found.engines and here != own_node()):
        raise ConfigError(
            f"rollout.engine.engines: {demand.engines} engines of this process need GPUs of "
            f"{own_node()} alone, found ranks on {', '.join(sorted(far | {here}))}. Set "
            f"cluster.rollout_workers={demand.engines}, rollout.engine.engines=1 and "
            "cluster.gpus_per_rank=0.5: a worker beside each rank, on any machine."
        )
    return [[bundle.gpu for bundle in engine] for engine in found.engines]


# ---------------------------------------------------------------- memory


def gpu_bytes() -> int:
    """Memory of this machine's first GPU; without one, of a card of 80 GB."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    return ASSUMED_GPU


def gpu_phases(
    config: RunConfig, model: Architecture, size: int, stage: int | None, engines: int
) -> dict[str, dict[str, int]]:
    """{phase: {part: bytes}} of one GPU of `size` bytes. stage: of the trainer rank there; None: no
    rank. engines: of vLLM there."""
    awake, asleep = (
        {name: engines * bytes_ for name, bytes_ in parts.items() if engines}
        for parts in vllm_parts(config, size)
    )
    if stage is None:
        return {"rollout": awake}
    beside = asleep if sleeps(config) else awake
    found = rank_phases(config, model, stage, awake, beside)
    if engines and config.rollout.engine.get("transfer") == "ipc":
        found["sync"] = {**found["rollout"], "weights to vLLM": buffer_bytes(config, model)}
    return found


def buffer_bytes(config: RunConfig, model: Architecture) -> int:
    """Of the buffer in which a rank hands the weights on: a bucket, or the embedding."""
    bucket = int(config.rollout.engine.get("bucket_mib") or VLLMOptions.bucket_mib) << 20
    return max(bucket, model.vocab * model.hidden * DTYPE_BYTES[config.model.dtype])


def vllm_parts(config: RunConfig, size: int) -> tuple[dict[str, int], dict[str, int]]:
    """What an engine of vLLM holds on a GPU of `size` bytes, awake and asleep."""
    options = config.rollout.engine
    arguments = options.get("arguments") or {}
    share = float(arguments.get("gpu_memory_utilization", UTILIZATION))
    several = int(options.get("tensor_parallel") or 1) > 1
    context = VLLM_CONTEXT + several * VLLM_ASLEEP_SPLIT
    awake = {"vLLM's share": round(share * size), "vLLM's context": context}
    return awake, {"vLLM asleep": VLLM_ASLEEP + several * VLLM_ASLEEP_SPLIT}


def placed(config: RunConfig, placement: Placement | None = None) -> GpuPlan:
    """Which rank and engine have which GPU: where Ray has placed them, or else on this machine. On
    a cluster, or where there are too few, as if there were enough. Raises ConfigError."""
    demand = gpu_demand(config)
    here = visible_gpus() if config.cluster.address is None else []
    enough = here if len(here) >= demand.least else []
    found = list(placement.bundles) if placement else enough
    wanted = demand.least if found else demand.most
    # On a cluster, wherever there is room
    found += [Bundle("any", str(number)) for number in range(len(found), wanted)]
    return demand.plan(found)


def roles(config: RunConfig, placement: Placement | None = None) -> list[tuple[int | None, int]]:
    """(pipeline stage of the trainer rank or None, engines of vLLM there) of each GPU of the
    run."""
    found = placed(config, placement)
    engines = Counter(itertools.chain(*found.engines) if is_vllm(config) else ())
    # Ranks of a stage follow each other
    per_stage = found.ranks // config.trainer.pipeline_parallel
    return [
        (gpu // per_stage if gpu < found.ranks else None, engines[bundle])
        for gpu, bundle in enumerate(found.bundles)
    ]


def gpu_table(
    config: RunConfig, model: Architecture, placement: Placement | None = None
) -> list[str]:
    """Lines that say which rank and engine have which GPU, and the memory planned on it; [] for a
    run without GPUs. placement: where Ray has placed them; None: as it would. Raises
    ConfigError."""
    if not on_gpus(config):
        return []
    return placed(config, placement).table(_planned(config, model, placement))


def _planned(config: RunConfig, model: Architecture, placement: Placement | None) -> list[int]:
    """Bytes at the most of each GPU of the run; of the ranks' alone where the engine is not
    vLLM."""
    if is_vllm(config):
        found = [gpu_phases(config, model, gpu_bytes(), *role) for role in roles(config, placement)]
        return [max(sum(parts.values()) for parts in phases.values()) for phases in found]
    ranks = config.cluster.ranks or 1
    held = [one for one in estimate(config, model) if one.process != "driver"]
    names = list(dict.fromkeys(phase.process for phase in held))
    most = [max(phase.total for phase in held if phase.process == name) for name in names]
    return [size for size in most for _ in range(ranks // len(most))]


def gpu_memory(config: RunConfig, model: Architecture, size: int) -> list[PhaseMemory]:
    """Every phase of GPUs of `size` bytes, those alike together; [] for a run without GPUs, and for
    one whose engine is not vLLM. Raises ConfigError for a layout that the model cannot have."""
    if not (on_gpus(config) and is_vllm(config)):
        return []
    config.trainer.layout.check_model(model)
    found = []
    for (stage, engines), alike in itertools.groupby(
        enumerate(roles(config)), lambda pair: pair[1]
    ):
        name = _name([gpu for gpu, _ in alike], stage is not None, engines)
        phases = gpu_phases(config, model, size, stage, engines)
        found += [PhaseMemory(name, phase, parts) for phase, parts in phases.items()]
    return found


def _name(gpus: list[int], rank: bool, engines: int) -> str:
    where = f"GPU {gpus[0]}" if len(gpus) == 1 else f"GPUs {gpus[0]} to {gpus[-1]}"
    return f"{where}: {' + '.join(['rank'] * rank + ['vLLM'] * engines)}"


def check_gpu_memory(config: RunConfig, model: Architecture) -> None:
    """Raises ConfigError where a GPU would have to hold more than it has."""
    size = gpu_bytes()
    found = gpu_memory(config, model, size)
    if not found:
        return
    largest = max(found, key=lambda phase: phase.total)
    if largest.total > size:
        raise ConfigError(
            f"GPU memory: {largest.process}, {largest.phase}: about {largest.total / GIB:.1f} GiB "
            f"are needed, expected at most {size / GIB:.1f}: {_advice(largest.parts)}"
        )


def _advice(parts: Mapping[str, int]) -> str:
    share = "rollout.engine.arguments.gpu_memory_utilization"
    if "activations" in parts:
        beside = f" or {share}" if "vLLM's share" in parts else ""
        return (
            f"lower trainer.tokens_per_microbatch{beside}, set trainer.recompute or "
            "distributed_optimizer, or raise trainer.tensor_parallel."
        )
    return (
        f"lower {share}, set trainer.release_gradients or distributed_optimizer, or give the "
        "engines GPUs of their own."
    )
