"""Adam's state in the one form that checkpoints hold: moments (and the float32 weights of a
bfloat16 model) in the shapes of the parameters, whatever the layout and whether or not the
optimizer splits them over data-parallel ranks.

Megatron's own forms differ between its two optimizers and do not load into each other;
`fully_reshardable` also gathers every tensor on every rank. Here a split tensor is put together on
one rank, each rank in turn, and comes back that way."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedStateDict, ShardedTensor
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from rlflow.trainer.megatron.cpu import device

MOMENTS = ("exp_avg", "exp_avg_sq")
MAIN = "fp32_param"


@dataclass(frozen=True)
class Held:
    """What this rank holds of one parameter's state. `bounds[r]` to `bounds[r + 1]`: the elements
    of the flattened parameter that rank r of `group` updates; `owner`: the rank of `group` that
    writes and reads the whole. Without `group`, all of it is here."""

    # How the checkpoint calls the parameter, and which part of it this rank's model has
    entry: ShardedBase
    parameter: Parameter
    tensors: dict[str, Tensor]  # views; empty where this rank updates nothing of the parameter
    bounds: tuple[int, ...] = ()
    owner: int = 0
    group: ProcessGroup | None = None

    @property
    def owned(self) -> bool:
        return self.group is None or self.group.rank() == self.owner

    @property
    def written(self) -> bool:
        """Whether it is this model-parallel rank that writes the parameter (norms, for one, are on
        all of them)."""
        return self.group is None or not any(self.entry.replica_id[:-1])

    def described(self, name: str, data: Tensor) -> ShardedBase:
        """The tensor as dist_checkpointing wants it."""
        changes: dict[str, Any] = {"key": f"optimizer.state.{name}.{self.entry.key}", "data": data}
        if self.group is not None:  # the owner stands for all data-parallel ranks
            changes["replica_id"] = (*self.entry.replica_id[:-1], 0)
        if isinstance(self.entry, ShardedTensor):  # a factory takes the type from the data
            changes["dtype"] = data.dtype
        return replace(self.entry, **changes)


def sharded_state(optimizer: MegatronOptimizer, parameters: ShardedStateDict) -> ShardedStateDict:
    """The state to save; a collective over the data-parallel ranks where the optimizer splits
    it."""
    content: ShardedStateDict = {}
    for name, held in _all_held(optimizer, parameters):
        if not held.written:
            continue
        for part in _parts(held.parameter):
            whole = held.tensors[part] if held.group is None else _gather(held, held.group, part)
            if whole is not None:
                content.setdefault(name, {})[part] = held.described(
                    part, whole.reshape(held.parameter.shape)
                )
    return content


def requested_state(optimizer: MegatronOptimizer, parameters: ShardedStateDict) -> ShardedStateDict:
    """What `restore` will need of a checkpoint, on this rank."""
    return {
        name: {
            part: held.described(part, torch.empty(held.parameter.shape, dtype=torch.float32))
            for part in _parts(held.parameter)
        }
        for name, held in _all_held(optimizer, parameters)
        if held.owned
    }


@torch.no_grad()
def restore(
    optimizer: MegatronOptimizer, parameters: ShardedStateDict, loaded: dict[str, dict[str, Tensor]]
) -> None:
    """Copies what was loaded for `requested_state` into the optimizer; a collective where that
    splits its state."""
    for name, held in _all_held(optimizer, parameters):
        for part in _parts(held.parameter):
            if held.group is None:
                held.tensors[part].copy_(loaded[name][part])
            else:
                _scatter(held, held.group, part, loaded[name][part] if held.owned else None)


def _parts(parameter: Parameter) -> tuple[str, ...]:
    return MOMENTS if parameter.dtype is torch.float32 else (*MOMENTS, MAIN)


def _all_held(
    optimizer: MegatronOptimizer, parameters: ShardedStateDict
) -> Iterator[tuple[str, Held]]:
    """(name, state) of every parameter, in the same order on all data-parallel ranks."""
    names = {
        id(entry.data): name for name, entry in parameters.items() if isinstance(entry, ShardedBase)
    }
    owner = itertools.count()
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not inner.config.use_distributed_optimizer:
            for parameter in _parameters(inner):
                name = names[id(parameter)]
                yield name, Held(parameters[name], parameter, _whole(inner, parameter))
            continue
        group = inner.data_parallel_group
        for buffer in inner.buffers:
            for parameter, place in buffer.param_index_map.items():
                name, bounds = names[id(parameter)], _rank_bounds(buffer, place, group.size())
                mine = bounds[group.rank()] < bounds[group.rank() + 1]
                tensors = (
                    _renamed(inner._get_main_param_and_optimizer_states(parameter)) if mine else {}
                )
                yield (
                    name,
                    Held(
                        parameters[name],
                        parameter,
                        tensors,
                        bounds,
                        next(owner) % group.size(),
                        group,
                    ),
                )


def _parameters(optimizer: MegatronOptimizer) -> Iterator[Parameter]:
    """The model's parameters that the plain optimizer trains, in its order."""
    groups = getattr(optimizer, "float16_groups", None)
    if groups is None:
        yield from optimizer.get_parameters()
        return
    for half, full in zip(groups, optimizer.fp32_from_fp32_groups, strict=True):
        yield from itertools.chain(half, full)


def _whole(optimizer: MegatronOptimizer, parameter: Parameter) -> dict[str, Tensor]:
    main = parameter if parameter.dtype is torch.float32 else parameter.main_param  # type: ignore[attr-defined]
    return _renamed({"param": main, **optimizer.optimizer.state[main]})


def _renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        MAIN if key == "param" else key: value.detach()
        for key, value in tensors.items()
        if key != "step"
    }


def _rank_bounds(buffer: Any, place: tuple[int, int, int], ranks: int) -> tuple[int, ...]:
    """Where the parameter, flattened, is cut: its bucket is split evenly over the ranks, whatever
    lies in it."""
    # `param_index_map` of megatron-core, distributed/param_and_grad_buffer.py: first and last
    # element in the buffer, bucket.
    start, stop, index = place
    bucket = buffer.buckets[index]
    share = bucket.grad_data.numel() // ranks
    return tuple(
        min(max(bucket.offset + rank * share, start), stop) - start for rank in range(ranks + 1)
    )


def _gather(held: Held, group: ProcessGroup, part: str) -> Tensor | None:
    """The whole, flat, on the CPU of its owner; None elsewhere. Ranks that are further on have sent
    already."""
    rank = group.rank()
    if not held.owned:
        if held.tensors:
            target = dist.get_global_rank(group, held.owner)
            dist.send(held.tensors[part].to(device()).contiguous(), target, group=group)
        return None
    whole = torch.empty(held.bounds[-1], dtype=torch.float32, device=device())
    for other, (low, high) in enumerate(itertools.pairwise(held.bounds)):
        if other == rank and low < high:
            whole[low:high] = held.tensors[part]
        elif low < high:
            dist.recv(whole[low:high], dist.get_global_rank(group, other), group=group)
    return whole.cpu()


def _scatter(held: Held, group: ProcessGroup, part: str, whole: Tensor | None) -> None:
    """Copies this rank's part of the owner's tensor into the state."""
    rank = group.rank()
    if whole is None:
        if held.tensors:
            received = torch.empty(held.tensors[part].numel(), dtype=torch.float32, device=device())
            dist.recv(received, dist.get_global_rank(group, held.owner), group=group)
            held.tensors[part].copy_(received)
        return
    flat = whole.flatten().to(device())
    for other, (low, high) in enumerate(itertools.pairwise(held.bounds)):
        if other == rank and low < high:
            held.tensors[part].copy_(flat[low:high])
        elif low < high:
            dist.send(flat[low:high].contiguous(), dist.get_global_rank(group, other), group=group)
