"""The ranks: which of them share a model (tensor x pipeline parallel) and which replicate it (data parallel)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch.distributed import ProcessGroup

from rlflow.errors import ConfigError
from rlflow.trainer.megatron.cpu import adapted, sharing_groups


@dataclass(frozen=True)
class World:
    """This rank's place. `made_process_group` and `made_groups` say what `leave` has to take down."""

    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    tensor_rank: int
    pipeline_rank: int
    data_rank: int
    sequence_parallel: bool
    made_process_group: bool
    made_groups: bool

    @property
    def tensor_group(self) -> ProcessGroup:
        return parallel_state.get_tensor_model_parallel_group()

    @property
    def pipeline_group(self) -> ProcessGroup:
        return parallel_state.get_pipeline_model_parallel_group()

    @property
    def data_group(self) -> ProcessGroup:
        return parallel_state.get_data_parallel_group()

    @property
    def token_multiple(self) -> int:
        """What the number of tokens in a forward pass must be a multiple of: sequence parallelism splits them evenly."""
        return self.tensor_parallel if self.sequence_parallel else 1

    @property
    def first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline_parallel - 1

    def stage_root(self, stage: int) -> int:
        """The global rank of a pipeline stage within this rank's pipeline."""
        return dist.get_process_group_ranks(self.pipeline_group)[stage]


def join(tensor_parallel: int, pipeline_parallel: int, seed: int, sequence_parallel: bool = False) -> World:
    """Lays the model-parallel groups over the ranks of torch.distributed; where there are none, over this process alone.

    Raises ConfigError where the ranks cannot be divided so, or another trainer of this process divided them otherwise."""
    size = tensor_parallel * pipeline_parallel
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks % size:
        raise ConfigError(
            f"trainer: tensor_parallel={tensor_parallel} x pipeline_parallel={pipeline_parallel} needs a multiple of {size} "
            f"ranks, found {ranks}; set cluster.ranks or make them smaller."
        )
    made_process_group = not dist.is_initialized()
    if made_process_group:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    made_groups = not parallel_state.model_parallel_is_initialized()
    if made_groups:
        with sharing_groups():
            parallel_state.initialize_model_parallel(
                tensor_parallel, pipeline_parallel, create_gloo_process_groups=False
            )
    layout = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    if layout != (tensor_parallel, pipeline_parallel):
        raise ConfigError(
            f"trainer: this process already trains at TP{layout[0]} PP{layout[1]}, so TP{tensor_parallel} "
            f"PP{pipeline_parallel} is not possible beside it; close() the other trainer first."
        )
    with adapted(), torch.random.fork_rng(devices=[]):  # seeding Megatron's generators must not touch the caller's
        model_parallel_cuda_manual_seed(seed)
    return World(
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        data_parallel=ranks // size,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        data_rank=parallel_state.get_data_parallel_rank(),
        sequence_parallel=sequence_parallel,
        made_process_group=made_process_group,
        made_groups=made_groups,
    )


def leave(world: World) -> None:
    """Takes down the groups that `join` made."""
    if world.made_groups and parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if world.made_process_group and dist.is_initialized():
        dist.destroy_process_group()
