"""Carries out a plan: the bytes of targets, gathered from a source."""

from __future__ import annotations

import os
import threading
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from rlflow.storage.pickles import Chunk

from .dtypes import BFLOAT16, FLOAT8, FLOAT16, FLOAT32, FLOAT64, DType, as_tensor, cast
from .mapping.plan import Equal, Target, View
from .problems import damaged
from .readers.source import SCALED, Record, StoredTensor, TensorSource, unreadable

if TYPE_CHECKING:
    from torch import Tensor

Progress = Callable[[int, int], None]
"""Called with the bytes that were read since the last call, and those of the whole."""
BLOCK_BYTES = 4 << 20
"""Read and compared at a time."""
INFINITE = {
    BFLOAT16: (np.int16, 0x7F80, np.uint16, 0xFF80),
    FLOAT16: (np.int16, 0x7C00, np.uint16, 0xFC00),
    FLOAT32: (np.int32, 0x7F800000, np.uint32, 0xFF800000),
    FLOAT64: (np.int64, 0x7FF << 52, np.uint64, 0xFFF << 52),
}
"""Of each dtype: as signed integers, Inf and the NaNs with sign 0 are the numbers from the first
bound on; as unsigned ones, -Inf and the other NaNs those from the second on. Two passes without a
temporary array (IEEE 754 ordering)."""


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
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.__exit__(*error)

    def stop(self) -> None:
        """Ends what other threads still read, after a failure in one of them."""
        self._stopped.set()

    def blocks(self, target: Target) -> Iterator[np.ndarray]:
        """All rows in order, at most BLOCK_BYTES or one row at a time, in memory that the next
        block takes again."""
        step = block_rows(target.row_bytes)
        data = np.empty((min(step, target.rows), target.row_bytes), np.uint8)
        for first in range(0, target.rows, step):
            block = data[: target.rows - first]
            self._fill(target, first, block)
            yield block

    def fill(self, target: Target, out: np.ndarray) -> None:
        """Writes the whole target into `out`, its bytes."""
        rows = out.reshape(target.rows, -1)
        step = block_rows(target.row_bytes)
        for first in range(0, target.rows, step):
            self._fill(target, first, rows[first : first + step])

    def _fill(self, target: Target, first: int, out: np.ndarray) -> None:
        if self._stopped.is_set():
            raise OtherFailed
        self._reader.fill(target, first, out)
        signed, high, unsigned, low = INFINITE[target.dtype]
        flat = out.reshape(-1)
        if flat.view(signed).max() >= high or flat.view(unsigned).max() >= low:
            raise damaged(
                f"{self._origin}: '{target.name}' holds NaN or Inf as {target.dtype} "
                f"(rows {first} to {first + len(out)})."
            )
        with self._lock:
            self._progress(out.nbytes, self._total)


def block_rows(row_bytes: int) -> int:
    """Rows of a block."""
    return max(1, BLOCK_BYTES // row_bytes)


def check_equal(source: TensorSource, pairs: Iterable[Equal]) -> None:
    """Raises the ConversionError that a pair describes unless its views hold the same bytes."""
    with Reader(source) as reader:
        for pair in pairs:
            dtype = pair.first.stored.dtype
            width = pair.first.columns * dtype.itemsize
            step = block_rows(width)
            for row in range(0, pair.rows, step):
                found = np.empty((2, min(step, pair.rows - row), width), np.uint8)
                reader.read(pair.first, row, found[0], dtype)
                reader.read(pair.second, row, found[1], dtype)
                if not np.array_equal(*found):
                    raise pair.problem


def check_records(source: TensorSource, tensors: Iterable[StoredTensor]) -> None:
    """Raises ConversionError (4) where the bytes of tensors, and of copies that ranks have of them,
    are not what the files' own checksums say."""
    stored = [*tensors, *(tensor for pair in source.copies for tensor in pair)]
    places = (source.place_of(tensor, chunk) for tensor in stored for chunk in tensor.chunks)
    records = {place.record for place in places if place.record is not None}
    for record in sorted(records, key=lambda record: (record.file, record.start)):
        if _checksum(source, record) != record.crc32:
            raise damaged(
                f"{source.path / record.file}: {record.length} bytes at byte {record.start} are "
                "damaged (checksum); copy it again or use an earlier checkpoint."
            )


def _checksum(source: TensorSource, record: Record) -> int:
    found = 0
    with (source.path / record.file).open("rb") as file:
        file.seek(record.start)
        for done in range(0, record.length, BLOCK_BYTES):
            found = zlib.crc32(file.read(min(BLOCK_BYTES, record.length - done)), found)
    return found


class Reader:
    """Rows of a source's tensors, gathered from their chunks. Safe to use from several threads.

    All methods raise ConversionError (4) for what cannot be read."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._lock, self._opened = threading.Lock(), ExitStack()
        self._files: dict[str, int] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def fill(self, target: Target, first: int, out: np.ndarray) -> None:
        """Writes the target's rows from `first` on into `out`: (rows, bytes of a row)."""
        last = first + len(out)
        for tile in target.tiles:
            begin, end = max(first, tile.row), min(last, tile.row + tile.rows)
            if begin >= end:
                continue
            part = out[begin - first : end - first]
            if tile.view is None:
                part[:] = 0
            else:
                row = tile.source_row + begin - tile.row
                self.read(tile.view, row, part, target.dtype, tile.source_column)

    def tensor(self, view: View, dtype: DType) -> Tensor:
        """The whole of it, cast to `dtype`."""
        out = np.empty((view.shape[0], view.columns * dtype.itemsize), np.uint8)
        step = block_rows(out.shape[1])
        for row in range(0, len(out), step):
            self.read(view, row, out[row : row + step], dtype)
        return as_tensor(out, dtype, view.shape)

    def read(self, view: View, row: int, out: np.ndarray, dtype: DType, column: int = 0) -> None:
        """Writes the view's elements from (row, column) on into `out`, cast to `dtype`: (rows,
        bytes of a row). Whole rows are read, as rows of a matrix lie side by side."""
        stored, kind = view.stored, view.stored.dtype
        width = view.columns * kind.itemsize
        if kind is dtype and out.shape[1] == width:
            self._gather(view, row, out)
            return
        data = np.empty((len(out), width), np.uint8)
        self._gather(view, row, data)
        if stored.scales is not None:
            data, kind = self._scaled(stored.scales, data, row), FLOAT32
        columns = out.shape[1] // dtype.itemsize
        part = data[:, column * kind.itemsize : (column + columns) * kind.itemsize]
        out[:] = part if kind is dtype else cast(part, kind, dtype)

    def _gather(self, view: View, first: int, out: np.ndarray) -> None:
        """Whole rows from `first` on, as they are stored."""
        size, last = view.stored.dtype.itemsize, first + len(out)
        end = bisect_right(view.rectangles, last - 1, key=lambda rectangle: rectangle.row)
        for rectangle in view.rectangles[:end]:
            if rectangle.row + rectangle.rows <= first:
                continue
            top = max(first, rectangle.row)
            bottom = min(last, rectangle.row + rectangle.rows)
            left, width = rectangle.column * size, rectangle.columns * size
            place = out[top - first : bottom - first, left : left + width]
            start = rectangle.skipped * size + (top - rectangle.row) * width
            if place.flags.c_contiguous:
                self._read_all(view.stored, rectangle.chunk, start, place)
            else:
                data = np.empty(place.shape, np.uint8)
                self._read_all(view.stored, rectangle.chunk, start, data)
                place[:] = data

    def _scaled(self, stored: StoredTensor, data: np.ndarray, row: int) -> np.ndarray:
        """Values in 8 bits, from a row on, each times its block's scale, in float32 (DeepSeek-V3,
        arXiv 2412.19437, section 3.3.2)."""
        scales = View(stored)
        first, last = row // SCALED, (row + len(data) - 1) // SCALED + 1
        raw = np.empty((last - first, scales.columns * FLOAT32.itemsize), np.uint8)
        self._gather(scales, first, raw)
        factors = raw.view(np.float32).repeat(SCALED, axis=1)[:, : data.shape[1]]
        values = cast(data, FLOAT8, FLOAT32).view(np.float32)
        for block in range(first, last):
            rows = slice(max(block * SCALED - row, 0), (block + 1) * SCALED - row)
            values[rows] *= factors[block - first]
        return values.view(np.uint8)

    def _read_all(self, stored: StoredTensor, chunk: Chunk, skipped: int, out: np.ndarray) -> None:
        """Fills `out` with a chunk's bytes after the first `skipped`."""
        file = str(self._source.path / chunk.file)
        start = self._source.place_of(stored, chunk).start
        descriptor, offset = self._descriptor(chunk.file, file), start + skipped
        left = out.data.cast("B")
        while left:
            try:
                count = os.preadv(descriptor, [left], offset)
            except OSError as error:
                raise unreadable(error, file) from error
            if count == 0:
                raise damaged(f"{file}: ends at byte {offset}; it shrank while being read.")
            left, offset = left[count:], offset + count

    def _descriptor(self, name: str, file: str) -> int:
        with self._lock:
            if name not in self._files:
                try:
                    self._files[name] = os.open(file, os.O_RDONLY)
                except OSError as error:
                    raise unreadable(error, file) from None
                self._opened.callback(os.close, self._files[name])
            return self._files[name]
