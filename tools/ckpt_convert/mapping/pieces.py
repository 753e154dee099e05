"""The order of rows in Megatron's tensors, and their cut over ranks, for both directions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rlflow.models.architecture import Architecture
from rlflow.models.rules import Rule, Split

from .plan import Tile, View


def pieces(rule: Rule, model: Architecture) -> Iterator[tuple[int, int, int, int]]:
    """(row of the Megatron tensor, source, row of the source, rows), in order, without padding.

    Of queries, keys and values one query group follows the other (megatron-core,
    transformer/attention.py, SelfAttention.get_query_key_value_tensors)."""
    at = 0
    groups = model.groups if rule.split is Split.QKV else 1
    heights = [shape[0] // groups for shape in rule.shapes(model)]
    for group in range(groups):
        for source, height in enumerate(heights):
            yield at, source, group * height, height
            at += height


def whole_shape(rule: Rule, model: Architecture) -> tuple[int, ...]:
    """Of the Megatron tensor of all ranks, without padding."""
    shapes = rule.shapes(model)
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def whole_tiles(
    rule: Rule, views: Sequence[View], model: Architecture, vocab_rows: int
) -> tuple[tuple[int, ...], list[Tile]]:
    """(shape, rows) of the Megatron tensor of all ranks; the vocabulary padded with zeros."""
    height, *rest = whole_shape(rule, model)
    tiles = [
        Tile(row, rows, views[source], first) for row, source, first, rows in pieces(rule, model)
    ]
    if rule.split is Split.VOCAB and vocab_rows > height:
        tiles.append(Tile(height, vocab_rows - height, None))
        height = vocab_rows
    return (height, *rest), tiles


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""First element and size per axis."""


def boxes_of(split: Split, shape: Sequence[int], rank: int, ranks: int) -> list[Box]:
    """The parts of a whole tensor that a tensor-parallel rank has, in the order in which it has
    them.

    Of GATE_UP, its gate rows and its up rows (megatron-core, transformer/mlp.py,
    apply_swiglu_sharded_factory). With more ranks than query groups a rank has rows of one group,
    wherever they begin."""
    if split in (Split.REPLICATED, Split.LATENT):
        return [((0,) * len(shape), tuple(shape))]
    axis = 1 if split is Split.ROW else 0
    halves = 2 if split is Split.GATE_UP else 1
    sizes = list(shape)
    sizes[axis] //= ranks * halves
    found = []
    for half in range(halves):
        offsets = [0] * len(shape)
        offsets[axis] = (half * ranks + rank) * sizes[axis]
        found.append((tuple(offsets), tuple(sizes)))
    return found


def bands(offsets: tuple[int, ...], sizes: tuple[int, ...], most: int) -> Iterator[Box]:
    """A box in bands of rows of at most `most` elements, or one row."""
    step = max(1, most // math.prod(sizes[1:]))
    for first in range(0, sizes[0], step):
        rows = min(step, sizes[0] - first)
        yield (offsets[0] + first, *offsets[1:]), (rows, *sizes[1:])


def cropped(
    tiles: Sequence[Tile], offsets: Sequence[int], sizes: Sequence[int]
) -> tuple[Tile, ...]:
    """The rows of a box as those of a target."""
    first, last = offsets[0], offsets[0] + sizes[0]
    column = offsets[1] if len(offsets) > 1 else 0
    found = []
    for tile in tiles:
        begin, end = max(first, tile.row), min(last, tile.row + tile.rows)
        if begin < end:
            row = tile.source_row + begin - tile.row
            found.append(Tile(begin - first, end - begin, tile.view, row, column))
    return tuple(found)
