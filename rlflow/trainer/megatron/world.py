"""The ranks: which of them share a model (tensor x pipeline x context parallel), which replicate it
(data parallel)."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from weakref import WeakSet

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor
from torch.distributed import ProcessGroup

from rlflow.errors import ConfigError, RLFlowError
from rlflow.trainer.layout import ParallelLayout
from rlflow.trainer.megatron.cpu import adapted, sharing_groups


@dataclass(frozen=True, eq=False)
class World:
    """This rank's place in a layout: a trainer's, until it `leave`s. Every trainer of a process has
    its own."""

    layout: ParallelLayout
    data_parallel: int
    tensor_rank: int
    pipeline_rank: int
    context_rank: int
    data_rank: int
    expert_rank: int

    @property
    def tensor_parallel(self) -> int:
        return self.layout.tensor_parallel

    @property
    def pipeline_parallel(self) -> int:
        return self.layout.pipeline_parallel

    @property
    def tensor_group(self) -> ProcessGroup:
        return parallel_state.get_tensor_model_parallel_group()

    @property
    def pipeline_group(self) -> ProcessGroup:
        return parallel_state.get_pipeline_model_parallel_group()

    @property
    def context_group(self) -> ProcessGroup:
        return parallel_state.get_context_parallel_group()

    @property
    def data_group(self) -> ProcessGroup:
        """The ranks with the same part of the model and of each row, but other rows."""
        return parallel_state.get_data_parallel_group()

    @property
    def expert_group(self) -> ProcessGroup:
        """The ranks of a stage that hold a layer's experts together."""
        return parallel_state.get_expert_model_parallel_group()

    @property
    def replica(self) -> int:
        """Which of the ranks with the same part of the model this is: context- and data-parallel
        ranks together."""
        return parallel_state.get_data_parallel_rank(with_context_parallel=True)

    @property
    def first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline_parallel - 1

    def from_stage(self, stage: int, tensor: Tensor) -> Tensor:
        """What one stage of this rank's pipeline has, on all of them, in place where it is
        contiguous. A collective of the pipeline."""
        if self.pipeline_parallel > 1:
            tensor = tensor.contiguous()
            dist.broadcast(tensor, group=self.pipeline_group, group_src=stage)
        return tensor


@dataclass
class _Groups:
    """The groups of this process, which torch and megatron-core hold once for all: whether `join`
    made them (what a caller made is his to end), and the worlds that stand on them."""

    process_group: bool = False
    model_parallel: bool = False
    worlds: WeakSet[World] = field(default_factory=WeakSet)


_GROUPS = _Groups()


def join(layout: ParallelLayout, seed: int) -> World:
    """Lays the model-parallel groups over the ranks of torch.distributed; where there are none,
    over this process alone.

    Raises ConfigError where the ranks cannot be divided so, or another trainer of this process
    divided them otherwise."""
    data_parallel = layout.data_parallel(dist.get_world_size() if dist.is_initialized() else 1)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        _GROUPS.process_group = True
    if not parallel_state.model_parallel_is_initialized():
        with sharing_groups():
            parallel_state.initialize_model_parallel(
                layout.tensor_parallel,
                layout.pipeline_parallel,
                virtual_pipeline_model_parallel_size=layout.virtual_pipeline
                if layout.virtual_pipeline > 1
                else None,
                context_parallel_size=layout.context_parallel,
                distributed_timeout_minutes=_timeout() / timedelta(minutes=1),
                expert_model_parallel_size=layout.expert_parallel,
                expert_tensor_parallel_size=1,
                create_gloo_process_groups=False,
            )
        _GROUPS.model_parallel = True
    _check_groups(layout)
    # Seeding Megatron's generators must not touch the caller's
    with adapted(), torch.random.fork_rng(devices=[]):
        model_parallel_cuda_manual_seed(seed)
    world = World(
        layout=layout,
        data_parallel=data_parallel,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        context_rank=parallel_state.get_context_parallel_rank(),
        data_rank=parallel_state.get_data_parallel_rank(),
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
    )
    _GROUPS.worlds.add(world)
    return world


def _timeout() -> timedelta:
    """Of collectives of all ranks; groups of some would wait for Megatron's 30 minutes."""
    ranks = dist.distributed_c10d._get_default_group()
    return ranks._get_backend(ranks._device_types[0]).options._timeout


def _check_groups(layout: ParallelLayout) -> None:
    """Raises ConfigError where this process has groups of another layout."""
    found = ParallelLayout(
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        layout.sequence_parallel,
        parallel_state.get_expert_model_parallel_world_size(),
    )
    if found != layout:
        raise ConfigError(
            f"trainer: this process already trains at {found.name}, so {layout.name} is not "
            "possible beside it; close() the other trainer first."
        )


def check_joined(world: World) -> None:
    """Raises RLFlowError for a world that was left: its groups may be gone."""
    if world not in _GROUPS.worlds:
        raise RLFlowError("trainer: it is closed; make a new one.")


def leave(world: World) -> None:
    """Ends a world; with the last one, takes down the groups that `join` made. May be called twice.

    gloo's threads, some 50 per rank, end once nothing refers to a group."""
    if world not in _GROUPS.worlds:
        return
    _GROUPS.worlds.discard(world)
    RotaryEmbedding.forward.cache_clear()  # remembers its model, and that its groups
    if _GROUPS.worlds:
        return
    made_groups, _GROUPS.model_parallel = _GROUPS.model_parallel, False
    made_process_group, _GROUPS.process_group = _GROUPS.process_group, False
    if made_groups and parallel_state.model_parallel_is_initialized():
        groups = {
            group
            for group in parallel_state._global_process_group_list
            if isinstance(group, ProcessGroup)
        }
        parallel_state.destroy_model_parallel()  # forgets them only
        for group in groups:
            dist.destroy_process_group(group)
    if made_process_group and dist.is_initialized():
        dist.destroy_process_group()
