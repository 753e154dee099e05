"""LoRA adapters in plain torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from rlflow.trainer.lora import A, B, first_factor, measured
from rlflow.trainer.options import LoraOptions


class LowRank(torch.nn.Module):
    """The adapter of one linear layer in plain torch: what B A adds to its outputs, and to its
    weight. arrival: `measured` of the last merge."""

    def __init__(
        self, layer: str, linear: torch.nn.Linear, options: LoraOptions, seed: int
    ) -> None:
        super().__init__()
        self.scale = options.scale
        self.arrival = torch.zeros(2, dtype=torch.float64)
        self.a = Parameter(
            first_factor(layer, options.rank, linear.in_features, seed).to(linear.weight)
        )
        self.b = Parameter(torch.zeros(linear.out_features, options.rank).to(linear.weight))

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return F.linear(F.linear(inputs, self.a), self.b) * self.scale

    @torch.no_grad()
    def merged(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """A new tensor: the weight (out, in) of the layer with the adapter in it."""
        added = self.scale * (self.b @ self.a)
        whole = (weight + added).to(dtype)
        self.arrival = measured(weight, added, whole)
        return whole


def attach(
    model: torch.nn.Module, options: LoraOptions, seed: int, trained: str = "output_layer."
) -> dict[str, LowRank]:
    """Freezes a transformers model but for parameters whose names begin with `trained`, and gives
    each target an adapter as its submodule `lora`. Returns them by the layer's name."""
    made: dict[str, LowRank] = {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(trained))
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in options.targets:
            made[name] = module.lora = LowRank(name, module, options, seed)
            module.register_forward_hook(_added)
    return made


def _added(layer: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    adapter: Any = layer.lora
    return output + adapter(inputs[0])


def named_factors(adapters: Mapping[str, LowRank]) -> Iterator[tuple[str, Tensor]]:
    """(name as of `Trainer.adapter_weights`, factor) pairs."""
    for layer, adapter in adapters.items():
        yield f"{layer}.{A}.weight", adapter.a
        yield f"{layer}.{B}.weight", adapter.b
