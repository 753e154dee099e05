"""What a conversion writes: of which rectangles of source tensors every target tensor is made.

All tensors are matrices here: a vector of n elements is (n, 1), and a stack (layers, rows, columns) of matrices is
(layers * rows, columns), so that a rectangle is always a run of bytes per row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from rlflow.errors import ConversionError, ExitCode
from rlflow.storage.pickles import Chunk

from ..dtypes import DType
from ..readers.source import StoredTensor, covers_once


@dataclass(frozen=True)
class Rectangle:
    """The part of a view that one stored chunk holds. `skipped`: elements of the chunk before its first row."""

    chunk: Chunk
    skipped: int
    row: int
    column: int
    rows: int
    columns: int


@dataclass(frozen=True)
class View:
    """A stored tensor at some leading indices, such as one layer of a stack: a vector or a matrix."""

    stored: StoredTensor
    index: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape[len(self.index) :]

    @property
    def columns(self) -> int:
        return math.prod(self.shape[1:])

    def rectangles(self) -> list[Rectangle]:
        """The chunks' parts of this view, by row and column; they tile it."""
        depth = len(self.index)
        found = []
        for chunk in self.stored.chunks_at(self.index):
            place = 0
            for at, start, size in zip(self.index, chunk.offsets, chunk.sizes):
                place = place * size + at - start
            offsets, sizes = chunk.offsets[depth:], chunk.sizes[depth:]
            column = offsets[1] * math.prod(self.shape[2:]) if len(offsets) > 1 else 0
            width = math.prod(sizes[1:])
            found.append(Rectangle(chunk, place * math.prod(sizes), offsets[0], column, sizes[0], width))
        return sorted(found, key=lambda rectangle: (rectangle.row, rectangle.column))


@dataclass(frozen=True)
class Tile:
    """A rectangle of a target and where it comes from; zeros where `view` is None.

    Rows [row, row + rows) and columns [column, column + columns) of the target are those from (source_row,
    source_column) of the view on. columns None: the whole width of the target."""

    row: int
    rows: int
    view: View | None
    source_row: int = 0
    column: int = 0
    columns: int | None = None
    source_column: int = 0


@dataclass(frozen=True)
class Target:
    """A tensor to write. `columns`: the width of its matrix. Its tiles are in order of rows and tile it."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    columns: int
    tiles: tuple[Tile, ...]

    @property
    def rows(self) -> int:
        return math.prod(self.shape) // self.columns

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        return self.columns * self.dtype.itemsize


@dataclass(frozen=True)
class Equal:
    """The first `rows` rows of two views must be the same bytes; else `problem` is what is wrong with the source."""

    first: View
    second: View
    rows: int
    problem: str
    exit_code: ExitCode


@dataclass(frozen=True)
class Plan:
    """Every target in the order in which it is written. `equal` is compared before anything is written."""

    targets: tuple[Target, ...]
    equal: tuple[Equal, ...] = ()

    @cached_property
    def parameters(self) -> int:
        return sum(math.prod(target.shape) for target in self.targets)

    @cached_property
    def nbytes(self) -> int:
        return sum(target.nbytes for target in self.targets)

    def check(self) -> None:
        """Raises ConversionError (6) unless names are unique and each target is tiled by tiles that lie in their views.

        Such a plan is a mistake in a table of families, found before a byte is written."""
        if len({target.name for target in self.targets}) != len(self.targets):
            raise ConversionError("the plan makes a tensor twice; this is a bug.", ExitCode.UNKNOWN_MODEL)
        for target in self.targets:
            inside = all(_lies_inside(target, tile) for tile in target.tiles)
            if not inside or not covers_once(
                [_box(target, tile) for tile in target.tiles], (target.rows, target.columns)
            ):
                raise ConversionError(
                    f"'{target.name}' {target.shape} would not be made of its sources exactly once; this is a bug.",
                    ExitCode.UNKNOWN_MODEL,
                )


def _box(target: Target, tile: Tile) -> tuple[tuple[int, int], tuple[int, int]]:
    columns = target.columns if tile.columns is None else tile.columns
    return (tile.row, tile.rows), (tile.column, columns)


def _lies_inside(target: Target, tile: Tile) -> bool:
    if tile.view is None:
        return True
    _, (_, columns) = _box(target, tile)
    rows = tile.view.shape[0]
    return 0 <= tile.source_row <= rows - tile.rows and 0 <= tile.source_column <= tile.view.columns - columns
