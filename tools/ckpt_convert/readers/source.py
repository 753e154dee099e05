"""The tables of a checkpoint or model directory: tensors by name, and where their bytes are.

A conversion has three parts. A *source* is read from a format (torch_dist.py, legacy.py,
safetensors_files.py). A *plan* (mapping/plan.py) says of which rows of source tensors every target
tensor is made. *Output files* (writers/files.py) hold the targets. stream.py copies from the first
to the last and knows no format."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rlflow.errors import ConversionError
from rlflow.storage.pickles import Chunk

from ..dtypes import DType
from ..problems import damaged

SCALED = 128
"""Rows and columns of a block that has one scale."""
MOST_NAMED = 6
"""Names of objects in a remark."""
LONGEST_NAME = 80
MOST_CELLS = 1 << 26
"""Of the grid on which chunks are compared; no writer cuts a tensor as finely."""


@dataclass(frozen=True)
class Record:
    """A run of bytes of a file, and its CRC-32."""

    file: str
    start: int
    length: int
    crc32: int


@dataclass(frozen=True)
class ChunkPlace:
    """First byte of a chunk's elements, row after row. record: the bytes around them that have a
    checksum."""

    start: int
    record: Record | None = None


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a source; its chunks are disjoint and make up the whole of it.

    scales: what each block of SCALED x SCALED elements is multiplied by, in float32."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    chunks: tuple[Chunk, ...]
    scales: StoredTensor | None = None

    def chunks_at(self, index: tuple[int, ...]) -> Sequence[Chunk]:
        """The chunks that hold something of these leading indices."""
        if not index:
            return self.chunks
        if len(index) not in self._by_index:
            table: dict[tuple[int, ...], list[Chunk]] = {}
            for chunk in self.chunks:
                boxes = zip(chunk.offsets, chunk.sizes)
                lead = [range(at, at + size) for at, size in boxes][: len(index)]
                for place in itertools.product(*lead):
                    table.setdefault(place, []).append(chunk)
            self._by_index[len(index)] = table
        return self._by_index[len(index)].get(index, ())

    @cached_property
    def _by_index(self) -> dict[int, dict[tuple[int, ...], list[Chunk]]]:
        return {}


@dataclass(frozen=True)
class TensorSource:
    """A checkpoint or model directory whose tables have been read and checked; no weights.

    place_of: where a chunk's elements are; called from several threads, raises ConversionError (4)
    for damage. tables: the files that describe the others, and `headers` their hash where that is
    not of their bytes. copies: pairs that must hold the same bytes, because ranks have the tensor
    more than once. The rest, as far as the files tell: the training step, `tensor_parallel` and
    other sizes of the run that saved it, Megatron's arguments, the model by field of
    `models.architecture.Architecture`, rlflow's own manifest, and the names of objects beside the
    weights that were passed over, because no reader of ours needs them."""

    path: Path
    format: str
    tensors: dict[str, StoredTensor]
    place_of: Callable[[StoredTensor, Chunk], ChunkPlace]
    stamps: Stamps
    tables: tuple[str, ...]
    headers: str = ""
    copies: tuple[tuple[StoredTensor, StoredTensor], ...] = ()
    iteration: int | None = None
    layout: Mapping[str, int] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    described: Mapping[str, Any] = field(default_factory=dict)
    manifest: Mapping[str, Any] = field(default_factory=dict)
    passed_over: tuple[str, ...] = ()

    def remark(self) -> str:
        """What was passed over, as the end of a sentence; empty for nothing."""
        if not self.passed_over:
            return ""
        names = ", ".join(name[:LONGEST_NAME] for name in self.passed_over[:MOST_NAMED])
        more = len(self.passed_over) - MOST_NAMED
        rest = f" and {more} more" if more > 0 else ""
        return f"passed over beside the weights, not loaded: {names}{rest}"

    def identity(self) -> dict[str, Any]:
        """`files`: {relative name: [bytes, mtime in ns]}, `headers`: hash of the tables. Equal
        means: nothing changed."""
        scales = [stored.scales for stored in self.tensors.values() if stored.scales is not None]
        stored = [*self.tensors.values(), *scales]
        files = {*self.tables, *(chunk.file for tensor in stored for chunk in tensor.chunks)}
        tables = hashlib.sha256()
        for name in () if self.headers else sorted(self.tables):
            tables.update((self.path / name).read_bytes())
        return {
            "files": {name: list(self.stamps.seen.get(name, ())[:2]) for name in sorted(files)},
            "headers": self.headers or tables.hexdigest(),
        }


def unreadable(error: OSError, path: str | Path) -> ConversionError:
    """The error (4) for a file that the operating system does not let us read."""
    reason = error.strerror or error
    return damaged(f"{error.filename or path}: cannot be read ({reason}).")


class Stamps:
    """The files of a directory before the first was read: size, both times, place on the disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        files = (file for pattern in ("*", "*/*") for file in path.glob(pattern) if file.is_file())
        self.seen = {file.relative_to(path).as_posix(): _stamp(file) for file in files}

    def check(self, names: Iterable[str]) -> None:
        """Raises ConversionError (4) where one of these files is another one now, or was written
        to."""
        for name in sorted(names):
            file = self._path / name
            if not file.is_file() or self.seen.get(name) != _stamp(file):
                raise damaged(
                    f"{file}: was written to while it was read, so that what was read may be of "
                    "two models; convert again when nothing writes there."
                )


def _stamp(file: Path) -> tuple[int, ...]:
    status = file.stat()
    times = status.st_mtime_ns, status.st_ctime_ns
    return status.st_size, *times, status.st_dev, status.st_ino


Box = tuple[tuple[int, int], ...]
"""(first, size) per axis."""


def covers_once(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Whether boxes lie inside a shape and cover each of its elements once.

    Counted is on the grid of their edges, which has about as many cells as there are boxes where
    ranks, layers and experts were cut alike."""
    if not shape:
        return list(boxes) == [()]
    if not boxes:
        return 0 in shape
    if any(len(box) != len(shape) or min(size for _, size in box) < 1 for box in boxes):
        return False
    edges = []
    for axis, full in enumerate(shape):
        found = {edge for box in boxes for edge in (box[axis][0], sum(box[axis]))}
        if min(found) != 0 or max(found) != full:
            return False
        edges.append({edge: number for number, edge in enumerate(sorted(found))})
    grid = [len(found) - 1 for found in edges]
    if np.prod(grid, dtype=float) > MOST_CELLS:
        return False
    counts = np.zeros(grid, np.uint16)
    for box in boxes:
        places = zip(edges, box)
        counts[tuple(slice(found[at], found[at + size]) for found, (at, size) in places)] += 1
    return bool((counts == 1).all())
