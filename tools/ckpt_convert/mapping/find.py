"""Where a checkpoint keeps a tensor of the tables: under which name, and at which index of a stack.

megatron-core stacks the keys of equal layers and of experts (`decoder.layers.mlp.experts.experts.linear_fc1.weight` is
(layers, experts, rows, columns)), or numbers one or both of them (`non_homogeneous_layers`, `singleton_local_shards`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from rlflow.errors import ConversionError, ExitCode
from rlflow.models.architecture import Architecture
from rlflow.models.rules import Rule
from rlflow.models.tables import OUTPUT

from ..readers.source import StoredTensor, TensorSource
from .plan import View

GATE, UP = "linear_fc1.weight_w", "linear_fc1.weight_v"
"""With `singleton_local_shards`, Megatron keeps the two halves of fc1 apart (megatron-core, transformer/mlp.py,
apply_swiglu_sharded_factory)."""


def find_view(
    source: TensorSource, tensors: Mapping[str, StoredTensor], rule: Rule, layer: int, model: Architecture
) -> View:
    """The place of a rule's tensor for a layer. Raises ConversionError (7) where there is none or a stack has another
    height than config.json implies."""
    for key, index, sizes in _places(rule, layer, model):
        if key not in tensors:
            continue
        if tensors[key].shape[: len(index)] != sizes:
            raise ConversionError(
                f"{source.path}: '{key}' has shape {tensors[key].shape}, config.json implies {sizes[0]} layers"
                f"{f' and {sizes[-1]} experts' if rule.expert is not None else ''}.",
                ExitCode.OTHER_MODEL,
            )
        return View(tensors[key], index)
    expected = next(_places(rule, layer, model, stacked=False))[0]
    raise ConversionError(
        f"{source.path}: '{expected}' is missing, which config.json implies"
        f"{' (the checkpoint is of a tied model?)' if rule is OUTPUT else ''}.",
        ExitCode.OTHER_MODEL,
    )


def _places(
    rule: Rule, layer: int, model: Architecture, stacked: bool = True
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """(key, index, sizes of the indexed axes) of every place where the tensor may be."""
    for name, expert, experts in _names(rule, model):
        if rule.per_layer and stacked:
            yield name.replace("{i}.", ""), (layer, *expert), (model.layers, *experts)
        yield name.format(i=layer), expert, experts


def _names(rule: Rule, model: Architecture) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """The same for one layer: `{i}` is left in the name."""
    if rule.expert is None or model.experts is None:
        for name in (rule.fused, rule.megatron, rule.local_key):
            if name:
                yield name, (), ()
        return
    before, after = rule.megatron.split("local_experts.{e}.")
    yield f"{before}experts.{after}", (rule.expert,), (model.experts.count,)
    yield f"{before}experts.{rule.expert}.{after}", (), ()
    yield rule.megatron.replace("{e}", str(rule.expert)), (), ()


def join_gate_up(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors, with the halves of an fc1 that are kept apart as one tensor under its usual name."""
    result = dict(tensors)
    for name, gate in tensors.items():
        up = tensors.get(name.removesuffix(GATE) + UP) if name.endswith(GATE) else None
        if up is None or (up.shape, up.dtype) != (gate.shape, gate.dtype) or len(gate.shape) < 2:
            continue
        del result[gate.name], result[up.name]
        axis = len(gate.shape) - 2
        moved = [
            dataclasses.replace(chunk, offsets=_plus(chunk.offsets, axis, gate.shape[axis])) for chunk in up.chunks
        ]
        whole = name.removesuffix("_w")
        result[whole] = StoredTensor(
            whole, _plus(gate.shape, axis, gate.shape[axis]), gate.dtype, (*gate.chunks, *moved)
        )
    return result


def _plus(numbers: tuple[int, ...], axis: int, more: int) -> tuple[int, ...]:
    return (*numbers[:axis], numbers[axis] + more, *numbers[axis + 1 :])
