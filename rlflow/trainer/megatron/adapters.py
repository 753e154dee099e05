"""A model whose weights are frozen and whose adapters are trained: made, gathered, saved, switched
off."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from rlflow.models.architecture import Architecture, placed_rules
from rlflow.models.huggingface import WeightFiles, combined_hash, tensor_hash
from rlflow.trainer import lora
from rlflow.trainer.layout import stage_of
from rlflow.trainer.lora import identity
from rlflow.trainer.megatron import low_rank
from rlflow.trainer.megatron.cpu import device
from rlflow.trainer.megatron.model import PolicyModel, trained_parameters
from rlflow.trainer.megatron.model_weights import all_shards, held_rules, parameter_name
from rlflow.trainer.megatron.world import World
from rlflow.trainer.options import LoraOptions


def attach(
    chunks: Sequence[PolicyModel],
    model: Architecture,
    world: World,
    options: LoraOptions,
    seed: int,
) -> None:
    """Freezes the chunks but for parameters of their own (a critic's head), and gives every target
    an adapter."""
    dtype = next(chunks[0].parameters()).dtype
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(name in chunk.own_parameters)
        if chunk.config.recompute_granularity is not None and chunk.pre_process:
            # Megatron's checkpointing gives no gradients to anything inside unless an input asks
            # for one.
            chunk.embedding.register_forward_hook(_asking_for_gradients)
    for rule, layer, number in held_rules(chunks, model, world):
        if low_rank.wanted(rule, options):
            name = parameter_name(rule, layer, model, world.layout, fused=False)
            made = low_rank.LayerAdapter(rule, layer, model, world, options, seed, dtype)
            low_rank.add(
                chunks[number].get_submodule(name.removesuffix(".weight")), made.to(device())
            )


def _asking_for_gradients(_: torch.nn.Module, __: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def base_identity(options: LoraOptions | None, weights: WeightFiles) -> dict[str, Any] | None:
    """What `rlflow.trainer.lora.identity` says of adapters over these weights. A collective: each
    rank hashes its share."""
    if options is None:
        return None
    own = sorted(weights)[dist.get_rank() :: dist.get_world_size()]
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, [tensor_hash(name, weights[name]) for name in own])
    return identity(options, combined_hash(one for share in shares for one in share))


def gather_adapters(
    chunks: Sequence[PolicyModel], model: Architecture, world: World, options: LoraOptions
) -> Iterator[tuple[str, Tensor]]:
    """(name, whole factor on the CPU) pairs as of `Trainer.adapter_weights` on every rank. A
    collective."""
    dtype = next(chunks[0].parameters()).dtype
    for rule, layer in placed_rules(model):
        if not low_rank.wanted(rule, options):
            continue
        stage, chunk = stage_of(rule, layer, model, world.layout)
        held: dict[str, Tensor] = {}
        if stage == world.pipeline_rank:
            name = parameter_name(rule, layer, model, world.layout, fused=False)
            adapter = low_rank.adapter_of(chunks[chunk], name)
            assert adapter is not None
            for name, part, axis in adapter.factors():
                own = part.detach()
                held[name] = own if axis is None else torch.cat(all_shards(own, world), dim=axis)
        for name, shape in low_rank.factor_shapes(rule, layer, model, options):
            factor = held[name] if held else torch.empty(shape, dtype=dtype, device=device())
            yield name, world.from_stage(stage, factor).to("cpu", copy=True)


def arrived(chunks: Sequence[PolicyModel]) -> float | None:
    """See `Trainer.adapters_arrived`. A collective."""
    sums = torch.zeros(2, dtype=torch.float64, device=device())
    for chunk in chunks:
        for adapter in low_rank.adapters_of(chunk):
            sums += adapter.arrival.to(sums.device)
    dist.all_reduce(sums)
    return lora.arrived(sums)


def entries(modules: Sequence[PolicyModel], others: Mapping[str, Any]) -> dict[str, Any]:
    """{name: its place in a checkpoint} of what is trained. others: the places of parameters that
    are no adapters."""
    places: dict[int, ShardedTensor] = {}
    for chunk in modules:
        for adapter in low_rank.adapters_of(chunk):
            places |= adapter.entries()
    return {
        name: places.get(id(value), others.get(name)) for name, value in trained_parameters(modules)
    }


def all_zero(values: Mapping[str, Tensor]) -> bool:
    """Whether these values of the adapters change nothing: every B is 0 on every rank. A
    collective."""
    changed = any(bool(value.any()) for name, value in values.items() if ".adapter.b." in name)
    answer = torch.tensor(int(changed), device=device())
    dist.all_reduce(answer, dist.ReduceOp.MAX)
    return not bool(answer)


@contextlib.contextmanager
def switched_off(chunks: Sequence[PolicyModel]) -> Iterator[None]:
    """Inside, the model is the one that the frozen weights are."""
    found = [adapter for chunk in chunks for adapter in low_rank.adapters_of(chunk)]
    for adapter in found:
        adapter.switched_on = False
    try:
        yield
    finally:
        for adapter in found:
            adapter.switched_on = True
