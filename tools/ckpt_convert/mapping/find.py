"""Finds a tensor of the tables in a torch_dist checkpoint: its key, and its index in a stack.

megatron-core stacks the keys of equal layers and of experts
(`decoder.layers.mlp.experts.experts.linear_fc1.weight` is (layers, experts, rows, columns)), or
numbers one or both of them (`non_homogeneous_layers`, `singleton_local_shards`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from rlflow.models.architecture import Architecture
from rlflow.models.layer_rules import OUTPUT
from rlflow.models.rules import Rule

from ..problems import other_model
from ..readers.source import StoredTensor, TensorSource
from .plan import View

GATE, UP = "linear_fc1.weight_w", "linear_fc1.weight_v"
"""With `singleton_local_shards`, Megatron keeps the two halves of fc1 apart (megatron-core,
transformer/mlp.py, apply_swiglu_sharded_factory)."""
Place = tuple[str, tuple[int, ...], tuple[int, ...]]
"""(key, index in the stacks, heights of the stacks)."""


def stacked_place(
    name: str, rule: Rule, layer: int, model: Architecture, layers_stacked: bool
) -> Place:
    """Where a tensor of this name is, with experts stacked."""
    index: tuple[int, ...] = ()
    heights: tuple[int, ...] = ()
    if rule.expert is not None and model.experts is not None:
        name = name.replace("local_experts.{e}.", "experts.")
        index, heights = (rule.expert,), (model.experts.count,)
    if rule.per_layer and layers_stacked:
        name = name.replace("{i}.", "")
        index, heights = (layer, *index), (model.layers, *heights)
    return name.format(i=layer), index, heights


def find_view(
    source: TensorSource,
    tensors: Mapping[str, StoredTensor],
    rule: Rule,
    layer: int,
    model: Architecture,
) -> View:
    """The place of a rule's tensor for a layer. Raises ConversionError (7) where there is none or a
    stack has another height than config.json implies."""
    for key, index, heights in _places(rule, layer, model):
        if key not in tensors:
            continue
        if tensors[key].shape[: len(index)] != heights:
            experts = f" and {heights[-1]} experts" if rule.expert is not None else ""
            raise other_model(
                f"{source.path}: '{key}' has shape {tensors[key].shape}, config.json implies "
                f"{heights[0]} layers{experts}."
            )
        return View(tensors[key], index)
    expected = stacked_place(rule.keys[0], rule, layer, model, False)[0]
    why = " (the checkpoint is of a tied model?)" if rule.stands_for(OUTPUT) else ""
    raise other_model(f"{source.path}: '{expected}' is missing, which config.json implies{why}.")


def _places(rule: Rule, layer: int, model: Architecture) -> Iterator[Place]:
    for name in rule.keys:
        if rule.per_layer:
            yield stacked_place(name, rule, layer, model, True)
        yield stacked_place(name, rule, layer, model, False)
        if rule.expert is None:
            continue
        before, after = name.split("local_experts.{e}.")
        for numbered in (
            f"{before}experts.{rule.expert}.",
            f"{before}local_experts.{rule.expert}.",
        ):
            yield (numbered + after).format(i=layer), (), ()
            stacked = (numbered + after).replace("{i}.", "")
            yield stacked, (layer,), (model.layers,)


def join_gate_up(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors, with the halves of an fc1 that are kept apart joined under its usual name."""
    result = dict(tensors)
    for name, gate in tensors.items():
        up = tensors.get(name.removesuffix(GATE) + UP) if name.endswith(GATE) else None
        if up is None or (up.shape, up.dtype) != (gate.shape, gate.dtype) or len(gate.shape) < 2:
            continue
        del result[gate.name], result[up.name]
        *lead, height, width = gate.shape
        moved = []
        for chunk in up.chunks:
            *place, row, column = chunk.offsets
            moved.append(dataclasses.replace(chunk, offsets=(*place, row + height, column)))
        whole = name.removesuffix("_w")
        shape = (*lead, 2 * height, width)
        result[whole] = StoredTensor(whole, shape, gate.dtype, (*gate.chunks, *moved))
    return result
