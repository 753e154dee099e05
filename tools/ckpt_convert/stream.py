"""Carries out a plan: the bytes of targets, gathered from a source."""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from rlflow.errors import ConversionError, ExitCode
from rlflow.storage.pickles import Chunk

from .dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, DType, cast, from_float32, to_float32
from .mapping.plan import Equal, Rectangle, Target, Tile, View
from .readers.source import SCALED, Content, StoredTensor, TensorSource, unreadable

Progress = Callable[[int, int], None]
"""Called with the bytes that were read since the last call, and those of the whole."""
BLOCK_BYTES = 4 << 20
"""Of a target, at a time."""
COMPARED_BYTES = 4 << 20
INFINITE = {
    BFLOAT16: (np.int16, 0x7F80, np.uint16, 0xFF80),
    FLOAT16: (np.int16, 0x7C00, np.uint16, 0xFC00),
    FLOAT32: (np.int32, 0x7F800000, np.uint32, 0xFF800000),
    FLOAT64: (np.int64, 0x7FF << 52, np.uint64, 0xFFF << 52),
}
"""Of each dtype: as signed integers, Inf and the NaNs with sign 0 are the numbers from the first bound on; as unsigned
ones, -Inf and the other NaNs those from the second on. Two passes without a temporary array (IEEE 754 ordering)."""


class OtherFailed(Exception):
    """Another thread has failed."""


class Copier:
    """The bytes of a plan's targets. Safe to use from several threads; `progress` is called by one
    at a time.

    All methods raise ConversionError (4) for a damaged source and for NaN or Inf in the weights."""

    def __init__(self, source: TensorSource, total: int, progress: Progress) -> None:
        self._origin = str(source.path)
        self._reader = Reader(source)
        self._total, self._progress = total, progress
        self._lock, self._stopped = threading.Lock(), threading.Event()

    def __enter__(self) -> Copier:
        self._progress(0, self._total)
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.__exit__(*error)

    def stop(self) -> None:
        """Ends what other threads still read, after a failure in one of them."""
        self._stopped.set()

    def rows(self, target: Target, first: int, last: int) -> np.ndarray:
        """Rows [first, last): (rows, bytes of a row)."""
        data = np.empty((last - first, target.row_bytes), np.uint8)
        self._fill(target, first, data)
        return data

    def blocks(self, target: Target) -> Iterator[np.ndarray]:
        """All rows in order, at most BLOCK_BYTES or one row at a time, in memory that the next
        block takes again."""
        step = max(1, BLOCK_BYTES // target.row_bytes)
        data = np.empty((min(step, target.rows), target.row_bytes), np.uint8)
        for first in range(0, target.rows, step):
            block = data[: target.rows - first]
            self._fill(target, first, block)
            yield block

    def fill(self, target: Target, out: np.ndarray) -> None:
        """Writes the whole target into `out`, its bytes."""
        rows = out.reshape(target.rows, -1)
        step = max(1, BLOCK_BYTES // target.row_bytes)
        for first in range(0, target.rows, step):
            self._fill(target, first, rows[first : first + step])

    def _fill(self, target: Target, first: int, out: np.ndarray) -> None:
        if self._stopped.is_set():
            raise OtherFailed
        self._reader.fill(target, first, out)
        check_finite(out, target, first, self._origin)
        with self._lock:
            self._progress(out.nbytes, self._total)


def check_finite(data: np.ndarray, target: Target, first: int, origin: str) -> None:
    """Raises ConversionError (4) where rows of a target, from `first` on, have NaN or Inf."""
    signed, high, unsigned, low = INFINITE[target.dtype]
    flat = data.reshape(-1)
    if flat.view(signed).max() >= high or flat.view(unsigned).max() >= low:
        raise ConversionError(
            f"{origin}: '{target.name}' holds NaN or Inf as {target.dtype} "
            f"(rows {first} to {first + len(data)}).",
            ExitCode.DAMAGED,
        )


def check_equal(source: TensorSource, equal: Equal) -> None:
    """Raises the ConversionError that `equal` describes unless the two views hold the same bytes."""
    width = equal.first.columns * equal.first.stored.dtype.itemsize
    step = max(1, COMPARED_BYTES // width)
    pair = np.empty((2, min(step, equal.rows), width), np.uint8)
    with Reader(source) as reader:
        for row in range(0, equal.rows, step):
            first, second = pair[:, : min(step, equal.rows - row)]
            reader.read(equal.first, row, 0, first, equal.first.stored.dtype)
            reader.read(equal.second, row, 0, second, equal.first.stored.dtype)
            if not np.array_equal(first, second):
                raise ConversionError(equal.problem, equal.exit_code)


class Reader:
    """Rectangles of a source, gathered from its chunks. Safe to use from several threads."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._contents: dict[tuple[str, Chunk], Content] = {}
        self._files: dict[str, int] = {}
        self._rectangles: dict[tuple[str, tuple[int, ...]], tuple[list[Rectangle], list[int]]] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def fill(self, target: Target, first: int, out: np.ndarray) -> None:
        """Writes the target's rows from `first` on into `out`: (rows, bytes of a row)."""
        last = first + len(out)
        for tile in _overlapping(target.tiles, first, last):
            begin, end = max(first, tile.row), min(last, tile.row + tile.rows)
            columns = target.columns if tile.columns is None else tile.columns
            size = target.dtype.itemsize
            part = out[begin - first : end - first, tile.column * size : (tile.column + columns) * size]
            if tile.view is None:
                part[:] = 0
            else:
                self.read(tile.view, tile.source_row + begin - tile.row, tile.source_column, part, target.dtype)

    def read(self, view: View, row: int, column: int, out: np.ndarray, dtype: DType) -> None:
        """Writes the view's elements from (row, column) on into `out`, cast to `dtype`: (rows, bytes of a row)."""
        columns = out.shape[1] // dtype.itemsize
        for rectangle in self._found(view, row, row + len(out)):
            top, bottom = max(row, rectangle.row), min(row + len(out), rectangle.row + rectangle.rows)
            left, right = max(column, rectangle.column), min(column + columns, rectangle.column + rectangle.columns)
            if top >= bottom or left >= right:
                continue
            size = dtype.itemsize
            place = out[top - row : bottom - row, (left - column) * size : (right - column) * size]
            self._copy(view, rectangle, top - rectangle.row, left - rectangle.column, place, dtype)

    def _copy(
        self, view: View, rectangle: Rectangle, row: int, column: int, place: np.ndarray, dtype: DType
    ) -> None:
        """Fills `place` from (row, column) of a chunk on; whole rows are read, as rows of a matrix lie side by side."""
        stored = view.stored
        descriptor, content, file = self._open(view, rectangle.chunk)
        size, rows = stored.dtype.itemsize, len(place)
        start = content.start + (rectangle.skipped + row * rectangle.columns) * size
        whole = place.shape[1] == rectangle.columns * dtype.itemsize
        if whole and stored.dtype is dtype and place.flags.c_contiguous:
            read_all(descriptor, place.data.cast("B"), start, file)
            return
        data = np.empty((rows, rectangle.columns * size), np.uint8)
        read_all(descriptor, data.data.cast("B"), start, file)
        width = place.shape[1] // dtype.itemsize
        part = data[:, column * size : (column + width) * size]
        if stored.scales is not None:
            values = self._scaled(stored, part, rectangle.row + row, rectangle.column + column)
            place[:] = from_float32(values, dtype)
        else:
            place[:] = part if stored.dtype is dtype else cast(part, stored.dtype, dtype)

    def _scaled(self, stored: StoredTensor, part: np.ndarray, row: int, column: int) -> np.ndarray:
        """The values of elements from (row, column) of a tensor on, each times its block's scale (DeepSeek-V3, arXiv 2412.19437,
        section 3.3.2)."""
        assert stored.scales is not None
        scales, values = View(stored.scales), to_float32(part, stored.dtype)
        first, last = row // SCALED, (row + len(values) - 1) // SCALED + 1
        raw = np.empty((last - first, scales.columns * FLOAT32.itemsize), np.uint8)
        self.read(scales, first, 0, raw, FLOAT32)
        wide = raw.view(np.float32).repeat(SCALED, axis=1)[:, column : column + values.shape[1]]
        for block in range(first, last):
            values[max(block * SCALED - row, 0) : (block + 1) * SCALED - row] *= wide[block - first]
        return values

    def _found(self, view: View, first: int, last: int) -> Iterator[Rectangle]:
        """The rectangles of a view that may have some of these rows."""
        key = view.stored.name, view.index
        with self._lock:
            if key not in self._rectangles:
                ordered = view.rectangles()
                self._rectangles[key] = ordered, [rectangle.row for rectangle in ordered]
            ordered, rows = self._rectangles[key]
        return (
            rectangle for rectangle in ordered[: bisect_right(rows, last)] if rectangle.row + rectangle.rows > first
        )

    def _open(self, view: View, chunk: Chunk) -> tuple[int, Content, str]:
        key, file = (view.stored.name, chunk), str(self._source.path / chunk.file)
        content = self._contents.get(key) or self._source.content(view.stored, chunk)  # outside the lock: it reads
        with self._lock:
            self._contents[key] = content
            if chunk.file not in self._files:
                try:
                    self._files[chunk.file] = os.open(file, os.O_RDONLY)
                except OSError as error:
                    raise unreadable(error, file) from None
            return self._files[chunk.file], content, file


def _overlapping(tiles: Sequence[Tile], first: int, last: int) -> Iterator[Tile]:
    return (tile for tile in tiles if tile.row < last and tile.row + tile.rows > first)


def read_all(descriptor: int, out: memoryview, offset: int, file: str) -> None:
    """Fills `out` from an offset of a file. Raises ConversionError (4) where that fails or the file ends before."""
    done = 0
    while done < len(out):
        try:
            count = os.preadv(descriptor, [out[done:]], offset + done)
        except OSError as error:
            raise ConversionError(f"{file}: cannot be read ({error.strerror}).", ExitCode.DAMAGED) from error
        if count == 0:
            raise ConversionError(
                f"{file}: ends at byte {offset + done}; it shrank while being read.", ExitCode.DAMAGED
            )
        done += count
