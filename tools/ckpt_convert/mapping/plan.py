"""The plan of a conversion: of which rows of source tensors every target tensor is made.

All tensors are matrices here: a vector of n elements is (n, 1), and a stack (layers, rows, columns)
of matrices is (layers * rows, columns)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from rlflow.errors import ConversionError
from rlflow.storage.pickles import Chunk

from ..dtypes import DType
from ..problems import unknown_model
from ..readers.source import StoredTensor


@dataclass(frozen=True)
class Rectangle:
    """The part of a view that one chunk holds. skipped: elements of the chunk before its first
    row."""

    chunk: Chunk
    skipped: int
    row: int
    column: int
    rows: int
    columns: int


@dataclass(frozen=True)
class View:
    """A stored tensor at some leading indices, such as one layer of a stack: a vector or matrix."""

    stored: StoredTensor
    index: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape[len(self.index) :]

    @property
    def columns(self) -> int:
        return math.prod(self.shape[1:])

    @cached_property
    def rectangles(self) -> list[Rectangle]:
        """The chunks' parts of this view, by row and column; they tile it."""
        depth = len(self.index)
        found = []
        for chunk in self.stored.chunks_at(self.index):
            place = 0
            for at, start, size in zip(self.index, chunk.offsets, chunk.sizes):
                place = place * size + at - start
            offsets, sizes = chunk.offsets[depth:], chunk.sizes[depth:]
            skipped, width = place * math.prod(sizes), math.prod(sizes[1:])
            column = offsets[1] * math.prod(self.shape[2:]) if len(offsets) > 1 else 0
            found.append(Rectangle(chunk, skipped, offsets[0], column, sizes[0], width))
        return sorted(found, key=lambda rectangle: (rectangle.row, rectangle.column))


@dataclass(frozen=True)
class Tile:
    """Rows [row, row + rows) of a target: those of a view from (source_row, source_column) on, as
    wide as the target; zeros where `view` is None."""

    row: int
    rows: int
    view: View | None
    source_row: int = 0
    source_column: int = 0


@dataclass(frozen=True)
class Target:
    """A tensor to write, and its rows in order."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    tiles: tuple[Tile, ...]

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def columns(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        return self.columns * self.dtype.itemsize

    @property
    def is_whole(self) -> bool:
        """Whether tiles make up all rows once and lie inside their views."""
        at = 0
        for tile in self.tiles:
            if tile.row != at or tile.rows < 1:
                return False
            at += tile.rows
            if tile.view is None:
                continue
            rows, columns = tile.source_row + tile.rows, tile.source_column + self.columns
            if rows > tile.view.shape[0] or columns > tile.view.columns:
                return False
        return at == self.rows


@dataclass(frozen=True)
class Equal:
    """The first `rows` rows of two views must be the same bytes; else `problem` is raised."""

    first: View
    second: View
    rows: int
    problem: ConversionError


@dataclass(frozen=True)
class Plan:
    """Every target in the order in which it is written. `equal` is compared before that."""

    targets: tuple[Target, ...]
    equal: tuple[Equal, ...] = ()

    @cached_property
    def parameters(self) -> int:
        return sum(math.prod(target.shape) for target in self.targets)

    @cached_property
    def nbytes(self) -> int:
        return sum(target.nbytes for target in self.targets)

    def check(self) -> None:
        """Raises ConversionError (6) for a target that comes twice or is not made of its sources.

        Such a plan is a mistake in a table of families, found before a byte is written."""
        if len({target.name for target in self.targets}) != len(self.targets):
            raise unknown_model("the plan makes a tensor twice; this is a bug.")
        for target in self.targets:
            if not target.is_whole:
                raise unknown_model(
                    f"'{target.name}' {target.shape} would not be made of its sources exactly "
                    "once; this is a bug."
                )
