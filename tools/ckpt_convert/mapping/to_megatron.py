"""The plan of an import: from HuggingFace tensors, every rank's part of every Megatron tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from rlflow.models.architecture import Architecture, own_rule, placed_rules, tied_output
from rlflow.models.huggingface import IGNORED_SUFFIXES
from rlflow.models.layer_rules import OUTPUT
from rlflow.models.rules import Rule, Split

from ..dtypes import BFLOAT16, FLOAT8, DType
from ..problems import other_model, unknown_model
from ..readers.source import StoredTensor, TensorSource
from .layout import CheckpointLayout, check_divides
from .pieces import bands, boxes_of, cropped, whole_tiles
from .plan import Equal, Tile, View
from .to_huggingface import same_as_embedding, some_of


@dataclass(frozen=True)
class RankPart:
    """A box of a whole Megatron tensor, and its rows."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class Import:
    """The checked source and model, and how to cut it. dtype: of the output; None keeps each
    tensor's."""

    source: TensorSource
    model: Architecture
    layout: CheckpointLayout
    dtype: DType | None
    equal: tuple[Equal, ...]
    left_out: tuple[str, ...]

    def rules(self) -> Iterator[tuple[Rule, int]]:
        """(rule, layer) of the tables, with latent projections cut as the layers of this kind cut
        them."""
        for rule, layer in placed_rules(self.model):
            local = rule.split is Split.LATENT and not self.layout.fused
            yield (dataclasses.replace(rule, split=Split.COLUMN) if local else rule), layer

    def shape_of(self, rule: Rule, layer: int) -> tuple[int, ...]:
        """Of the whole tensor, padding included."""
        return self._whole(rule, layer)[0]

    def parts(self, rule: Rule, layer: int, rank: int, most: int) -> list[RankPart]:
        """What a tensor-parallel rank has of a tensor, in the order in which it has it; of at most
        `most` elements each, or one row."""
        shape, tiles = self._whole(rule, layer)
        found = boxes_of(rule.split, shape, rank, self.layout.tensor)
        boxes = [band for box in found for band in bands(*box, most)]
        return [RankPart(*box, cropped(tiles, *box)) for box in boxes]

    def dtype_of(self, rule: Rule, layer: int) -> DType:
        stored = self._views(rule, layer)[0].stored.dtype
        if self.dtype is None or rule.exact:
            return BFLOAT16 if stored is FLOAT8 else stored
        return self.dtype

    def _whole(self, rule: Rule, layer: int) -> tuple[tuple[int, ...], list[Tile]]:
        rows = self.layout.rows(self.model.vocab)
        return whole_tiles(rule, self._views(rule, layer), self.model, rows)

    def _views(self, rule: Rule, layer: int) -> list[View]:
        return [View(self.source.tensors[name]) for name in rule.names(layer)]


def make_import(
    source: TensorSource,
    model: Architecture,
    layout: CheckpointLayout,
    dtype: DType | None = None,
    later: tuple[str, ...] = (),
) -> Import:
    """The checked import. later: what the names begin with that are left out, of layers for
    multi-token prediction.

    Raises ConversionError for tensors that are missing, unknown (6), or of a shape that config.json
    does not imply (7), and for a layout that does not divide the model (5)."""
    check_divides(model, layout)
    left_out = tuple(name for name in source.tensors if name.startswith(later))
    skipped = {name for name in source.tensors if name.endswith(IGNORED_SUFFIXES)}
    left = {
        name: stored
        for name, stored in source.tensors.items()
        if name not in left_out and name not in skipped
    }
    for rule, layer in placed_rules(model):
        sources = zip(rule.names(layer), rule.shapes(model))
        kinds = {_take(source, left, name, shape).dtype for name, shape in sources}
        if len(kinds) > 1:
            raise other_model(
                f"{source.path}: {' and '.join(rule.names(layer))} become one tensor, but are of "
                f"{len(kinds)} dtypes; expected one."
            )
    output = left.pop(own_rule(model, OUTPUT).names()[0], None) if model.tied else None
    equal: tuple[Equal, ...] = ()
    if output is not None:  # files of a tied model may repeat the embedding
        embedding = View(source.tensors[tied_output(model).names()[0]])
        equal = (same_as_embedding(source, embedding, output, model),)
    if left:
        raise unknown_model(
            f"{source.path}: {len(left)} tensors have no place in a model of family "
            f"'{model.family}' with {model.layers} layers: {some_of(sorted(left))}."
        )
    return Import(source, model, layout, dtype, equal, left_out)


def _take(
    source: TensorSource, left: dict[str, StoredTensor], name: str, shape: tuple[int, ...]
) -> StoredTensor:
    stored = left.pop(name, None)
    if stored is None:
        raise unknown_model(
            f"{source.path}: tensor '{name}' is missing, which config.json implies."
        )
    if stored.shape != shape:
        raise other_model(
            f"{source.path}: '{name}' has shape {stored.shape}, config.json implies {shape}."
        )
    return stored
