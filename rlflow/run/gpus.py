"""GPUs of a run: which rank and engine gets which."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlflow.cluster.object_store import room_for
from rlflow.cluster.placement import Placement, own_node
from rlflow.config.schema import ClusterSection, ModelSection
from rlflow.devices.gpu_plan import Bundle, GpuPlan, visible_gpus
from rlflow.devices.gpu_plan import plan as plan_gpus
from rlflow.errors import ConfigError
from rlflow.models.huggingface import WeightFiles
from rlflow.rollout.engine_facts import EngineFacts
from rlflow.trainer.options import LoraOptions, torch_dtype

VERSIONS_STORED, BATCHES_BYTES = 3, 2**30


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
        return plan_gpus(bundles, self.ranks, self.engines, self.each, self.shared, again)


def gpu_demand(section: ClusterSection, engine: EngineFacts) -> GpuDemand:
    """Of a run on GPUs. Engines in this process, and workers of a share of a GPU, are on the ranks'
    GPUs; other workers have GPUs of their own."""
    on_first_gpu = engine.in_process and section.address is None
    known = section.rollout_workers or engine.own_gpus or on_first_gpu
    return GpuDemand(
        ranks=section.ranks or 1,
        engines=(section.rollout_workers or engine.count) if known else 0,
        each=engine.gpus_each,
        shared=not section.rollout_workers or 0 < section.gpus_per_rank < 1,
        in_workers=section.rollout_workers > 0,
    )


def check_gpus(section: ClusterSection, engine: EngineFacts) -> None:
    """Raises ConfigError for ranks, workers and engines that no placement could give their GPUs."""
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
        gpu_demand(section, engine).plan(visible_gpus())


def adapters_alone(lora: LoraOptions, engine: EngineFacts) -> bool:
    """Whether engines get adapters alone; else whole weights, with adapters merged in."""
    return lora.sync == "adapters" and engine.takes_adapters


def store_bytes(section: ModelSection, engine: EngineFacts, lora: LoraOptions | None) -> int:
    """What Ray's object store holds at a time: the two newest versions of what engines get, what
    readers have of a third, and batches."""
    shapes = WeightFiles(section.path).shapes()
    width = torch_dtype(section.dtype).itemsize
    if lora is not None and adapters_alone(lora, engine):
        adapted = (
            shape for name, shape in shapes.items() if name.split(".")[-2:][0] in lora.targets
        )
        values = sum(lora.rank * sum(shape) for shape in adapted)
    else:
        values = sum(map(math.prod, shapes.values()))
        if lora is not None:  # merged, in what the engines keep
            width = max(width, torch_dtype(engine.dtype(section.dtype)).itemsize)
    return VERSIONS_STORED * values * width + BATCHES_BYTES


def make_placement(
    section: ClusterSection, engine: EngineFacts, stored: Callable[[], int]
) -> Placement | None:
    """Ray with the ranks' GPUs or cores reserved, and GPUs of engines that share them; None for a
    run without ranks. The caller closes it. stored: `store_bytes` of the run, which reads the
    model's files. Raises ConfigError where the cluster cannot place
    them."""
    if not section.ranks:
        return None
    demand, gpus = gpu_demand(section, engine), section.gpus_per_rank > 0
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
        options=room_for(stored()) if section.rollout_workers else None,
    )
    try:
        engine_gpus(section, engine, placement)
    except BaseException:
        placement.close()
        raise
    return placement


def engine_gpus(
    section: ClusterSection, engine: EngineFacts, placement: Placement | None
) -> list[list[str]] | None:
    """The GPUs of each engine of this process, as CUDA_VISIBLE_DEVICES names them; None where
    nobody has placed them. Raises ConfigError for engines that cannot be where they would have to
    be."""
    demand = gpu_demand(section, engine)
    if placement is None or not section.gpus_per_rank or not demand.shared:
        return None
    plan = demand.plan(placement.bundles)
    if demand.in_workers:
        return None
    here = placement.bundles[0].node
    nodes = {bundle.node for bundles in plan.engines for bundle in bundles}
    far = nodes - {here, own_node()}
    if far or (plan.engines and here != own_node()):
        raise ConfigError(
            f"rollout.engine.engines: {demand.engines} engines of this process need GPUs of "
            f"{own_node()} alone, found ranks on {', '.join(sorted(far | {here}))}. Set "
            f"cluster.rollout_workers={demand.engines}, rollout.engine.engines=1 and "
            "cluster.gpus_per_rank=0.5: a worker beside each rank, on any machine."
        )
    return [[bundle.gpu for bundle in bundles] for bundles in plan.engines]
