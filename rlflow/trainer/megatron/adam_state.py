"""Adam's state in the one form that checkpoints hold: moments (and the float32 weights of a
bfloat16 model) in the shapes of the parameters, whatever the layout and whether or not the
optimizer splits them over data-parallel ranks.

Megatron's own forms differ between its two optimizers and do not load into each other;
`fully_reshardable` also gathers every tensor on every rank. Here a split tensor is put together on
one rank, each rank in turn, and comes back that way: some hundred MiB of tensors per collective."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedStateDict, ShardedTensor
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from rlflow.models.huggingface import in_groups
from rlflow.trainer.megatron.cpu import device
from rlflow.trainer.megatron.optimizer import chained

MOMENTS = ("exp_avg", "exp_avg_sq")
MAIN = "fp32_param"
ROUND = 1 << 26  # elements of all ranks together that one collective moves: 256 MiB


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

    def share(self, rank: int) -> int:
        """How many elements a rank of `group` updates."""
        return self.bounds[rank + 1] - self.bounds[rank]

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
    written = [(name, held) for name, held in _all_held(optimizer, parameters) if held.written]
    for group, names in _rounds(written):
        for part in _parts(next(iter(names.values())).parameter):
            if group is None:
                wholes = {name: held.tensors[part] for name, held in names.items()}
            else:
                wholes = _gather(names, group, part)
            for name, whole in wholes.items():
                shaped = whole.reshape(names[name].parameter.shape)
                content.setdefault(name, {})[part] = names[name].described(part, shaped)
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
    for group, names in _rounds(list(_all_held(optimizer, parameters))):
        for part in _parts(next(iter(names.values())).parameter):
            if group is None:
                for name, held in names.items():
                    held.tensors[part].copy_(loaded[name][part])
            else:
                _scatter(names, group, part, loaded)


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
    for inner in chained(optimizer):
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
    whole = parameter.dtype is torch.float32
    main = parameter if whole else parameter.main_param  # type: ignore[attr-defined]
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


def _rounds(
    held: Sequence[tuple[str, Held]],
) -> Iterator[tuple[ProcessGroup | None, dict[str, Held]]]:
    """Successive parameters of one group and type, up to ROUND elements together."""
    kinds = itertools.groupby(held, lambda pair: (pair[1].group, pair[1].parameter.dtype))
    for (group, _), alike in kinds:
        for together in in_groups(alike, lambda pair: pair[1].parameter.numel(), ROUND):
            yield group, dict(together)


def _gather(names: dict[str, Held], group: ProcessGroup, part: str) -> dict[str, Tensor]:
    """The wholes, flat, on the CPU of their owners."""
    mine = [tensor.flatten() for tensor in _by_owner(names, group, part)]
    received = _exchange(mine, _sent(names, group), _received(names, group), group).cpu()
    owned = [name for name, held in names.items() if held.owned]
    sizes = [names[name].share(rank) for rank in range(group.size()) for name in owned]
    pieces = received.split(sizes)
    return {name: torch.cat(pieces[place :: len(owned)]) for place, name in enumerate(owned)}


def _scatter(
    names: dict[str, Held], group: ProcessGroup, part: str, loaded: dict[str, dict[str, Tensor]]
) -> None:
    """Copies this rank's parts of the owners' tensors into the state."""
    mine = [
        loaded[name][part].flatten()[held.bounds[rank] : held.bounds[rank + 1]]
        for rank in range(group.size())
        for name, held in names.items()
        if held.owned
    ]
    received = _exchange(mine, _received(names, group), _sent(names, group), group)
    targets = _by_owner(names, group, part)
    pieces = received.split([target.numel() for target in targets])
    for target, piece in zip(targets, pieces, strict=True):
        target.copy_(piece.view(target.shape))


def _by_owner(names: dict[str, Held], group: ProcessGroup, part: str) -> list[Tensor]:
    """This rank's parts, in the order of their owners."""
    return [
        held.tensors[part]
        for owner in range(group.size())
        for held in names.values()
        if held.owner == owner and held.tensors
    ]


def _sent(names: dict[str, Held], group: ProcessGroup) -> list[int]:
    """How many elements of this rank's parts each rank owns."""
    rank = group.rank()
    return [
        sum(held.share(rank) for held in names.values() if held.owner == owner)
        for owner in range(group.size())
    ]


def _received(names: dict[str, Held], group: ProcessGroup) -> list[int]:
    """How many elements of what this rank owns each rank has."""
    owned = [held for held in names.values() if held.owned]
    return [sum(held.share(rank) for held in owned) for rank in range(group.size())]


def _exchange(
    parts: list[Tensor], sizes: list[int], expected: list[int], group: ProcessGroup
) -> Tensor:
    """What all ranks have for this one, end to end. sizes, expected: elements to and from each."""
    own = torch.cat(parts).to(device()) if parts else torch.empty(0, device=device())
    received = torch.empty(sum(expected), device=device())
    dist.all_to_all_single(received, own, expected, sizes, group=group)
    return received
