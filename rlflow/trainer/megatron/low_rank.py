"""Low-rank adapters (LoRA: Hu et al. 2021, arXiv 2106.09685) beside Megatron's column- and
row-parallel layers.

A layer fuses several projections (queries, keys and values; gate and up). Each has an adapter of
its own, as in HuggingFace's model, so that what is trained is what the package peft calls q_proj,
k_proj and so on. What crosses tensor-parallel ranks for an adapter is `rank` numbers per token,
never the layer's width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.nn import Parameter, ParameterDict

from rlflow.models.architecture import Architecture
from rlflow.models.rules import Rule, Split
from rlflow.trainer.lora import A, B, first_factor, measured
from rlflow.trainer.megatron.world import World
from rlflow.trainer.options import LoraOptions

SPLITS = (Split.COLUMN, Split.QKV, Split.GATE_UP, Split.ROW)
"""Of the layers that can have adapters."""


class LayerAdapter(torch.nn.Module):
    """The adapters of one Megatron layer: W x becomes W x + alpha / rank * B (A x) for each of its
    projections that is a target.

    a[name] (rank, in), b[name] (out, rank) of this rank. In a column-parallel layer every rank has
    all of A and B's rows of its own outputs, in a row-parallel one A's columns of its own inputs
    and all of B. What is whole on every rank has the same gradient there; under sequence
    parallelism that of its own tokens, which Megatron sums as it does for norms. arrival:
    `measured` of this rank's part in the last merge."""

    def __init__(
        self,
        rule: Rule,
        layer: int,
        model: Architecture,
        world: World,
        options: LoraOptions,
        seed: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.world, self.rank, self.scale, self.switched_on = (
            world,
            options.rank,
            options.scale,
            True,
        )
        self.row, self.split = rule.split is Split.ROW, rule.split
        self.arrival = torch.zeros(2, dtype=torch.float64)
        self.groups = model.groups // world.tensor_parallel
        self.layers = {
            _projection(name): name.removesuffix(".weight") for name in rule.names(layer)
        }
        # (out, in) over all ranks
        self.shapes = dict(zip(self.layers, rule.shapes(model), strict=True))
        self.a, self.b = ParameterDict(), ParameterDict()
        for name, (outputs, inputs) in self.shapes.items():
            if name not in options.targets:
                continue
            first = first_factor(self.layers[name], options.rank, inputs, seed)
            second = torch.zeros(outputs if self.row else self._share(outputs), options.rank)
            if self.row:
                first = first.chunk(world.tensor_parallel, dim=1)[world.tensor_rank].contiguous()
            self.a[name], self.b[name] = Parameter(first.to(dtype)), Parameter(second.to(dtype))
            whole, part = (self.b, self.a) if self.row else (self.a, self.b)
            # Marks of Megatron's: what is summed over tensor-parallel ranks, and what the gradient
            # norm counts once.
            whole[name].sequence_parallel = world.layout.sequence_parallel
            whole[name].tensor_model_parallel = False
            part[name].tensor_model_parallel = True

    def forward(self, inputs: Tensor) -> Tensor:
        """What is added to the layer's output: (tokens, rows, in) -> (tokens, rows, out), as the
        layer has them."""
        group, split_tokens = self.world.tensor_group, self.world.layout.sequence_parallel
        narrow = F.linear(inputs, torch.cat(list(self.a.values()))) * self.scale
        if self.row:
            total = (
                reduce_scatter_to_sequence_parallel_region
                if split_tokens
                else reduce_from_tensor_model_parallel_region
            )
            return F.linear(total(narrow, group=group), *self.b.values())
        if split_tokens:
            narrow = gather_from_sequence_parallel_region(
                narrow, tensor_parallel_output_grad=True, group=group
            )
        else:
            narrow = copy_to_tensor_model_parallel_region(narrow, group=group)
        parts = dict(zip(self.a, narrow.split(self.rank, dim=-1), strict=True))
        return self._fused(
            [
                F.linear(parts[name], self.b[name])
                if name in parts
                else narrow.new_zeros(*narrow.shape[:-1], self._share(self.shapes[name][0]))
                for name in self.shapes
            ],
            dim=narrow.dim() - 1,
        )

    @torch.no_grad()
    def merged(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """A new tensor: this rank's weight of the layer with the adapters in it, added in
        float32."""
        changes = [
            self.scale * (self.b[name].float() @ self.a[name].float())
            if name in self.a
            else weight.new_zeros(self._share(outputs), weight.shape[1], dtype=torch.float32)
            for name, (outputs, _) in self.shapes.items()
        ]
        added = self._fused(changes, dim=0)
        whole = (weight.float() + added).to(dtype)
        self.arrival = measured(weight, added, whole)
        return whole

    def factors(self) -> Iterator[tuple[str, Parameter, int | None]]:
        """(name as of `Trainer.adapter_weights`, this rank's part, the dimension along which it is
        split), in the order of `factor_shapes`."""
        for name, layer in self.layers.items():
            if name in self.a:
                yield f"{layer}.{A}.weight", self.a[name], 1 if self.row else None
                yield f"{layer}.{B}.weight", self.b[name], None if self.row else 0

    def entries(self) -> dict[int, ShardedTensor]:
        """{id of a parameter: its place in a checkpoint}. Keys are HuggingFace's names, which no
        layout changes."""
        found = {}
        for name, parameter, axis in self.factors():
            world, split = self.world, axis is not None
            offsets = [(axis, world.tensor_rank, world.tensor_parallel)] if split else []
            replica = (0, 0 if split else world.tensor_rank, world.replica)
            found[id(parameter)] = ShardedTensor.from_rank_offsets(
                f"lora.{name}", parameter, *offsets, replica_id=replica
            )
        return found

    def _share(self, size: int) -> int:
        return size // self.world.tensor_parallel

    def _fused(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The projections' outputs, or rows of their weights, along `dim` in the order of the
        layer's own, which `rlflow.models.sharding.shard` has."""
        if self.split is Split.QKV:
            grouped = [part.unflatten(dim, (self.groups, -1)) for part in parts]
            return torch.cat(grouped, dim=dim + 1).flatten(dim, dim + 1)
        return torch.cat(list(parts), dim=dim) if len(parts) > 1 else parts[0]


def wanted(rule: Rule, options: LoraOptions) -> bool:
    """Whether a rule's layer has adapters. Rules of biases and of experts have none."""
    if rule.split not in SPLITS or not rule.per_layer or rule.per_expert:
        return False
    return any(
        name.endswith(".weight") and _projection(name) in options.targets for name in rule.names()
    )


def factor_shapes(
    rule: Rule, layer: int, model: Architecture, options: LoraOptions
) -> Iterator[tuple[str, tuple[int, int]]]:
    """(name as of `Trainer.adapter_weights`, shape over all ranks) of both factors of every target
    of a rule's layer."""
    for name, (outputs, inputs) in zip(rule.names(layer), rule.shapes(model), strict=True):
        if _projection(name) in options.targets:
            yield f"{name.removesuffix('.weight')}.{A}.weight", (options.rank, inputs)
            yield f"{name.removesuffix('.weight')}.{B}.weight", (outputs, options.rank)


def adapter_of(module: torch.nn.Module, parameter: str) -> LayerAdapter | None:
    """The adapters beside a weight, by its name in the module; None where it has none."""
    layer, _, kind = parameter.rpartition(".")
    found = getattr(module.get_submodule(layer), "adapter", None) if kind == "weight" else None
    return found if isinstance(found, LayerAdapter) else None


def adapters_of(module: torch.nn.Module) -> Iterator[LayerAdapter]:
    """All adapters of a model chunk."""
    return (found for found in module.modules() if isinstance(found, LayerAdapter))


def add(layer: torch.nn.Module, adapter: LayerAdapter) -> None:
    """Makes the adapter a part of its layer."""
    layer.adapter = adapter
    # Before a norm of the layer's output, which is a hook too
    layer.register_forward_hook(_added, prepend=True)


def _added(
    layer: torch.nn.Module, inputs: tuple[Tensor, ...], answer: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    adapter = layer.adapter
    assert isinstance(adapter, LayerAdapter)
    output, bias = answer
    return (output + adapter(inputs[0]), bias) if adapter.switched_on else answer


def _projection(name: str) -> str:
    """model.layers.0.self_attn.q_proj.weight -> q_proj."""
    return name.split(".")[-2]
