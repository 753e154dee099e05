"""Low-rank adapters beside the decoder's fused products (LoRA: Hu et al. 2021, arXiv 2106.09685)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.devices.matmul import linear
from rlflow.errors import ModelError, did_you_mean
from rlflow.models.adapter import Adapter, adapter_update
from rlflow.rollout.engine import check_weight


@dataclass(frozen=True)
class Projection:
    """Where a HuggingFace layer is in the decoder: `rows` of the fused product `part` of a layer,
    from `start` on, of `outputs` in all; of `inputs` numbers."""

    layer: int
    part: str
    start: int
    rows: int
    outputs: int
    inputs: int


@dataclass(frozen=True)
class FusedPair:
    """The adapters of one fused product. down (ranks, in): A of each projection, one below the
    other. up (out, ranks): their B, each in the rows of its projection and the columns of its A,
    0 elsewhere."""

    down: Tensor
    up: Tensor


class DecoderAdapter:
    """An adapter as the decoder applies it: W x becomes W x + B (scale * A x), in the decoder's
    dtype, as the trainer computes it.

    projections: of the decoder, by their HuggingFace layers. Raises ModelError where the adapter is
    not of this model."""

    def __init__(
        self,
        adapter: Adapter,
        projections: Mapping[str, Projection],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.scale = adapter.scale
        self._factors: dict[str, Tensor] = {}
        self._pairs: dict[tuple[int, str], FusedPair] = {}
        by_product: dict[tuple[int, str], list[str]] = {}
        for layer, (a, b) in adapter.factors.items():
            _check(layer, a, b, projections)
            place = projections[layer]
            by_product.setdefault((place.layer, place.part), []).append(layer)
        for product, layers in by_product.items():
            ranks = [len(adapter.factors[layer][0]) for layer in layers]
            first = projections[layers[0]]
            down = torch.empty(sum(ranks), first.inputs, dtype=dtype, device=device)
            up = torch.zeros(first.outputs, sum(ranks), dtype=dtype, device=device)
            self._pairs[product] = FusedPair(down, up)
            columns = up.split(ranks, dim=1)
            for layer, own_down, own_up in zip(layers, down.split(ranks), columns, strict=True):
                place = projections[layer]
                self._factors[f"{layer}.lora_A.weight"] = own_down
                self._factors[f"{layer}.lora_B.weight"] = own_up[place.start :][: place.rows]
        self.copy_in(adapter)

    def copy_in(self, adapter: Adapter) -> None:
        """Takes the numbers of an adapter of the same layers, ranks and scale (`is_like`)."""
        for layer, (a, b) in adapter.factors.items():
            self._factors[f"{layer}.lora_A.weight"].copy_(a)
            self._factors[f"{layer}.lora_B.weight"].copy_(b)

    def is_like(self, adapter: Adapter) -> bool:
        """Whether an adapter differs in its numbers alone, so that it fits in the same memory."""
        shapes = {
            f"{layer}.lora_{kind}.weight": factor.shape
            for layer, pair in adapter.factors.items()
            for kind, factor in zip("AB", pair, strict=True)
        }
        own = {name: factor.shape for name, factor in self._factors.items()}
        return self.scale == adapter.scale and own == shapes

    def add_to(
        self, product: Tensor, inputs: Tensor, layer: int, part: str, rows: Tensor | None
    ) -> None:
        """Adds what the adapter makes of the inputs (N, in) to a fused product (N, out). rows: of
        which alone; None: of all."""
        pair = self._pairs.get((layer, part))
        if pair is None:
            return
        if rows is not None:
            inputs = inputs[rows]
        added = linear(linear(inputs, pair.down) * self.scale, pair.up)
        if rows is None:
            product += added
        else:
            product.index_add_(0, rows, added)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What `adapter_update` sent, as it is kept and applied."""
        return adapter_update(self.scale, self._factors.items())


Applied = tuple[DecoderAdapter, Tensor | None]
"""An adapter, and the rows of a pass that it is applied to; None: all."""


def _check(layer: str, a: Tensor, b: Tensor, projections: Mapping[str, Projection]) -> None:
    """Raises ModelError for a layer that gets no adapter here, and for factors of other shapes or
    of a type that no weights have."""
    place = projections.get(layer)
    if place is None:
        raise ModelError(
            f"engine.load_weights: '{layer}' is no projection of this model that can have an "
            f"adapter.{did_you_mean(layer, projections)}"
        )
    check_weight(f"{layer}.lora_A.weight", a, (len(a), place.inputs))
    check_weight(f"{layer}.lora_B.weight", b, (place.rows, len(a)))
