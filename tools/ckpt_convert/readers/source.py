"""What a conversion reads: tensors by name, cut into chunks, each chunk's raw bytes at a known place of a file.

This is the first of the converter's three parts. A *source* knows a format (torch_dist.py; another format is another
class with the members of `TensorSource`). A *plan* (mapping/plan.py) says of which rectangles of source tensors every
target tensor is made. The *output files* (writers/output_files.py) are preallocated, and the targets lie in them. stream.py
copies from the first to the last as the plan says and knows neither format."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from rlflow.errors import ConversionError, ExitCode
from rlflow.storage.pickles import Chunk

from ..dtypes import DType

SCALED = 128


@dataclass(frozen=True)
class Content:
    """Where an chunk's raw bytes are in its file, row after row, and the checksum that the file has for them."""

    start: int
    bytes: int
    crc32: int | None = None


@dataclass(frozen=True)
class Record:
    """A run of bytes of a file, and its CRC-32."""

    start: int
    bytes: int
    crc32: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a source; its chunks are disjoint and make up the whole of it."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    chunks: tuple[Chunk, ...]
    scales: StoredTensor | None = None
    """What each block of SCALED x SCALED elements is multiplied by, in float32; None: elements are values."""

    def chunks_at(self, index: tuple[int, ...]) -> Sequence[Chunk]:
        """The chunks that hold something of these leading indices."""
        if not index:
            return self.chunks
        if len(index) not in self._by_index:
            table: dict[tuple[int, ...], list[Chunk]] = {}
            for chunk in self.chunks:
                lead = [range(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes)][: len(index)]
                for place in itertools.product(*lead):
                    table.setdefault(place, []).append(chunk)
            self._by_index[len(index)] = table
        return self._by_index[len(index)].get(index, ())

    @cached_property
    def _by_index(self) -> dict[int, dict[tuple[int, ...], list[Chunk]]]:
        return {}


class TensorSource(Protocol):
    """A checkpoint or model directory whose tables have been read and checked. Nothing of it is in memory."""

    path: Path
    """Directory that the chunks' files are relative to."""
    format: str
    tensors: dict[str, StoredTensor]
    stamps: Stamps
    copies: tuple[tuple[StoredTensor, StoredTensor], ...]
    """Tensors that the source has more than once, with another copy of theirs; they must hold the same bytes."""

    @property
    def iteration(self) -> int | None:
        """The training step that it was saved after, as far as its files tell."""

    @property
    def layout(self) -> Mapping[str, int]:
        """`tensor_parallel`, `pipeline_parallel`, ... of the run that saved it, as far as its files tell."""

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Megatron's arguments, as far as its files have them."""

    @property
    def described(self) -> Mapping[str, Any]:
        """What its files say of the model, by field of `models.architecture.Architecture`."""

    def content(self, stored: StoredTensor, chunk: Chunk) -> Content:
        """Where the raw bytes of an chunk are; called from several threads. Raises ConversionError (4) for damage."""

    def records(self) -> Iterator[tuple[str, Record]]:
        """(file, bytes with a checksum) of what tensors lie in, where `content` has no checksum for an chunk."""

    def identity(self) -> dict[str, Any]:
        """`files`: {relative name: [bytes, mtime in ns]}, `headers`: hash of the tables. Equal means: nothing changed."""


def unreadable(error: OSError, path: str | Path) -> ConversionError:
    """The error (4) for a file that the operating system does not let us read."""
    return ConversionError(f"{error.filename or path}: cannot be read ({error.strerror or error}).", ExitCode.DAMAGED)


class Stamps:
    """What the files of a directory looked like before the first of them was read: size, both times, place on the disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = {
            file.relative_to(path).as_posix(): _stamp(file)
            for pattern in ("*", "*/*")
            for file in path.glob(pattern)
            if file.is_file()
        }

    def check(self, names: Iterable[str]) -> None:
        """Raises ConversionError (4) where one of these files is another one now, or was written to."""
        for name in sorted(names):
            file = self._path / name
            if not file.is_file() or self._seen.get(name) != _stamp(file):
                raise ConversionError(
                    f"{file}: was written to while it was read, so that what was read may be of two models; convert again "
                    "when nothing writes there.",
                    ExitCode.DAMAGED,
                )


def _stamp(file: Path) -> tuple[int, ...]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_dev, status.st_ino


def identity_of(path: Path, files: Iterable[str], headers: Iterable[str]) -> dict[str, Any]:
    """The identity of a source: the size and time of all its files, and the content of those that describe the others."""
    content = hashlib.sha256()
    for name in sorted(headers):
        content.update((path / name).read_bytes())
    found = {name: (path / name).stat() for name in sorted({*files, *headers})}
    return {
        "files": {name: [status.st_size, status.st_mtime_ns] for name, status in found.items()},
        "headers": content.hexdigest(),
    }


Box = tuple[tuple[int, int], ...]
"""(first, size) per axis."""


def covers_once(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Whether boxes, (first, size) per axis, lie inside a shape and cover each of its elements once."""
    inside = all(
        len(box) == len(shape)
        and all(at >= 0 and size > 0 and at + size <= full for (at, size), full in zip(box, shape))
        for box in boxes
    )
    elements = sum(math.prod(size for _, size in box) for box in boxes)
    return inside and elements == math.prod(shape) and not _overlap(boxes)


def _overlap(boxes: Iterable[Box], axis: int = 0) -> bool:
    """Whether two boxes share an element. Compared are only boxes whose extents on an axis overlap without being equal,
    which chunks of ranks, layers and experts never do: otherwise the time is that of sorting."""
    ordered = sorted(boxes)
    if len(ordered) < 2 or axis == len(ordered[0]):
        return len(ordered) > 1
    end, runs = -1, []
    for box in ordered:
        at, size = box[axis]
        if at >= end or not runs:
            runs.append([box])
        else:
            runs[-1].append(box)
        end = max(end, at + size)
    for run in runs:
        if len({box[axis] for box in run}) == 1:
            if _overlap(run, axis + 1):
                return True
        elif any(_meet(first, second) for first, second in itertools.combinations(run, 2)):
            return True
    return False


def _meet(first: Box, second: Box) -> bool:
    return all(a < b + m and b < a + n for (a, n), (b, m) in zip(first, second))
