"""A model's weights from and to HuggingFace tensors, in any layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.models.architecture import Architecture, placed_rules, tied_output
from rlflow.models.huggingface import WeightFiles, check_loadable
from rlflow.models.layer_rules import TIED_OUTPUT, dtype_of
from rlflow.models.rules import Rule, Split
from rlflow.models.sharding import merge, shard
from rlflow.trainer.layout import ParallelLayout, stage_of
from rlflow.trainer.megatron.cpu import device
from rlflow.trainer.megatron.low_rank import adapter_of, wanted
from rlflow.trainer.megatron.model import PolicyModel
from rlflow.trainer.megatron.specs import is_fused
from rlflow.trainer.megatron.world import World
from rlflow.trainer.options import LoraOptions


def parameter_name(
    rule: Rule, layer: int, model: Architecture, layout: ParallelLayout, fused: bool
) -> str:
    """The name of a tensor within its chunk, where layers and experts count from 0 again. fused: in
    Transformer Engine's layers."""
    expert = 0 if rule.expert is None else rule.expert % layout.experts_here(model)
    return rule.megatron_name(layer % (model.layers // layout.stages), expert, fused)


@torch.no_grad()
def load_weights(
    chunks: Sequence[PolicyModel], model: Architecture, world: World, weights: WeightFiles
) -> None:
    """Copies the HuggingFace tensors into the parameters of this rank's chunks; a critic's own
    stay.

    Raises ModelError for missing or unknown tensors and for shapes that contradict config.json."""
    check_loadable(weights.path)
    rest = [chunk.own_tensors() for chunk in chunks]
    for rule, layer, chunk in held_rules(chunks, model, world):
        sources = [weights[name] for name in rule.names(layer)]
        parameter: Any = rest[chunk].pop(
            parameter_name(rule, layer, model, world.layout, is_fused(chunks[0].config))
        )
        place = (0, 1) if rule.per_expert else (world.tensor_rank, world.tensor_parallel)
        parameter.copy_(shard(rule, sources, model, *place))
        # Megatron marks this only where it initialises the weights itself; the gradient norm counts
        # unmarked parameters on the first tensor-parallel rank alone.
        parameter.tensor_model_parallel = rule.split not in (Split.REPLICATED, Split.LATENT)
        # Megatron sums gradients of experts over the ranks that hold the same ones, but at
        # expert_parallel 1 leaves out tensor-parallel ranks, which have tokens of their own.
        parameter.allreduce = not rule.per_expert
    unknown = [sorted(set(names) - chunks[0].own_parameters) for names in rest]
    assert not any(unknown), f"parameters without a rule: {unknown}"


def gather_weights(
    chunks: Sequence[PolicyModel],
    model: Architecture,
    world: World,
    where: str | None = "cpu",
    rounded: tuple[LoraOptions, torch.dtype] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """(HuggingFace name, full tensor) pairs on every rank, adapters merged into copies of their
    weights; one rule's tensors in memory at a time. where: the device of copies; None: parameters
    as they are, and what is made of them. rounded: layers with such adapters come in another dtype
    than the model's. A collective."""
    parameters = [chunk.own_tensors() for chunk in chunks]
    for rule, layer in _rules(chunks, model):
        stage, chunk = stage_of(rule, layer, model, world.layout)
        dtype = next(chunks[0].parameters()).dtype
        if rounded is not None and wanted(rule, rounded[0]):
            dtype = rounded[1]
        here = stage == world.pipeline_rank
        holder = _holder(rule, model, world.layout)
        if here and holder in (None, world.expert_rank):
            parameter = parameter_name(rule, layer, model, world.layout, is_fused(chunks[0].config))
            local = parameters[chunk][parameter].detach()
            adapter = adapter_of(chunks[chunk], parameter)
            local = local if adapter is None else adapter.merged(local, dtype)
            tensors = merge(rule, [local] if rule.per_expert else all_shards(local, world), model)
        else:
            tensors = [
                torch.empty(shape, dtype=dtype_of(name, dtype), device=device())
                for name, shape in zip(rule.names(layer), rule.shapes(model))
            ]
        for name, tensor in zip(rule.names(layer), tensors, strict=True):
            if holder is not None and here and world.layout.expert_parallel > 1:
                tensor = tensor.contiguous()
                dist.broadcast(tensor, group=world.expert_group, group_src=holder)
            tensor = world.from_stage(stage, tensor)
            yield name, tensor if where is None else tensor.to(where, copy=True)


def _holder(rule: Rule, model: Architecture, layout: ParallelLayout) -> int | None:
    """Which of the expert-parallel ranks holds a tensor; None: all do."""
    return None if rule.expert is None else rule.expert // layout.experts_here(model)


def all_shards(local: Tensor, world: World) -> list[Tensor]:
    """What all tensor-parallel ranks hold of a tensor. A collective."""
    if world.tensor_parallel == 1:
        return [local]
    shards = [torch.empty_like(local) for _ in range(world.tensor_parallel)]
    dist.all_gather(shards, local.contiguous(), group=world.tensor_group)
    return shards


def _rules(chunks: Sequence[PolicyModel], model: Architecture) -> Iterator[tuple[Rule, int]]:
    """(rule, layer) of the HuggingFace tensors that the model holds: a critic has no projection to
    the vocabulary."""
    return (
        (rule, layer)
        for rule, layer in placed_rules(model)
        if rule.megatron not in chunks[0].own_parameters
    )


def held_rules(
    chunks: Sequence[PolicyModel], model: Architecture, world: World
) -> Iterator[tuple[Rule, int, int]]:
    """(rule, layer, chunk) of everything that this rank holds."""
    for rule, layer in _rules(chunks, model):
        stage, chunk = stage_of(rule, layer, model, world.layout)
        held = _holder(rule, model, world.layout) in (None, world.expert_rank)
        if held and stage == world.pipeline_rank:
            yield rule, layer, chunk
    copied = model.tied and TIED_OUTPUT.megatron not in chunks[0].own_parameters
    if copied and world.last_stage and not world.first_stage:
        yield tied_output(model), 0, world.layout.virtual_pipeline - 1
