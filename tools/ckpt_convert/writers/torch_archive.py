"""Archives of torch.save, laid out before the tensors' bytes are there; readers/torch_archive.py reads them.

torch.save would need the tensors in memory. Here the pickle is written with stand-ins for them, the zip's tables follow
from names and sizes, and the checksums are filled in when the bytes have been copied (`seal`). The format is that of
torch's PyTorchStreamWriter: stored entries below one folder, each tensor's bytes at a multiple of 64."""

from __future__ import annotations

import io
import math
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..dtypes import DType
from .torch_pickle import OF_ARCHIVES, REBUILD_TENSOR, STORAGES, prepare

FOLDER = "archive"
ALIGNMENT = 64
LARGE = FULL = 0xFFFFFFFF
"""Sizes and offsets from LARGE on are written in 64-bit fields (zip64), and FULL in the 32-bit ones."""
LOCAL = struct.Struct("<4sHHHHHIIIHH")
CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
END64 = struct.Struct("<4sQHHIIQQQQ")
LOCATOR = struct.Struct("<4sIQI")
END = struct.Struct("<4sHHHHIIH")


@dataclass(frozen=True)
class TensorStandIn:
    """A stand-in for a tensor of a value. name: of the target that its bytes come from."""

    name: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Entry:
    """A file of the zip: its bytes, or the tensor that they come from; and where header and content begin."""

    name: str
    content: bytes | TensorStandIn
    header: int
    start: int

    @property
    def size(self) -> int:
        return self.content.nbytes if isinstance(self.content, TensorStandIn) else len(self.content)


@dataclass(frozen=True)
class ArchiveLayout:
    """A laid-out archive of `size` bytes."""

    entries: tuple[Entry, ...]
    size: int

    def places(self) -> dict[str, int]:
        """{name of a target: its first byte}."""
        return {entry.content.name: entry.start for entry in self.entries if isinstance(entry.content, TensorStandIn)}

    def literals(self, checksums: Mapping[str, int]) -> list[tuple[int, bytes]]:
        """(first byte, bytes) of everything but the tensors, given the CRC-32 of these."""
        found, directory = [], b""
        for entry in self.entries:
            if isinstance(entry.content, TensorStandIn):
                crc = checksums[entry.content.name]
            else:
                crc = zlib.crc32(entry.content)
                found.append((entry.start, entry.content))
            found.append((entry.header, _local_header(entry, crc)))
            directory += _central_header(entry, crc)
        at = self.entries[-1].start + self.entries[-1].size
        return [*found, (at, directory + _end(len(self.entries), at, len(directory)))]


def lay_out_archive(value: Any) -> ArchiveLayout:
    """The archive that torch.save would write of a value whose tensors are `TensorStandIn`s."""
    tensors: list[TensorStandIn] = []
    contents: list[tuple[str, bytes | TensorStandIn]] = [
        ("data.pkl", _pickled(value, tensors)),
        ("byteorder", b"little"),
    ]
    contents += [(f"data/{number}", tensor) for number, tensor in enumerate(tensors)]
    contents.append(("version", b"3\n"))
    entries, at = [], 0
    for name, content in contents:
        full = f"{FOLDER}/{name}"
        probe = Entry(full, content, at, 0)
        start = at + LOCAL.size + len(full) + len(_sizes64(probe.size)) + 4
        start = -(-start // ALIGNMENT) * ALIGNMENT
        entries.append(Entry(full, content, at, start))
        at = start + probe.size
    directory = sum(len(_central_header(entry, 0)) for entry in entries)
    return ArchiveLayout(tuple(entries), at + directory + len(_end(len(entries), at, directory)))


def archive_bytes(value: Any) -> bytes:
    """The archive of a value without tensors."""
    layout = lay_out_archive(value)
    content = bytearray(layout.size)
    for at, data in layout.literals({}):
        content[at : at + len(data)] = data
    return bytes(content)


class _Pickler(pickle.Pickler):
    """Writes stand-ins as torch writes tensors, and notes them in order; a storage is named by its number."""

    def __init__(self, file: io.BytesIO, tensors: list[TensorStandIn]) -> None:
        super().__init__(file, protocol=2)
        prepare(self, file, *OF_ARCHIVES)
        self._tensors = tensors

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, TensorStandIn):
            return NotImplemented
        strides = tuple(math.prod(value.shape[axis + 1 :]) for axis in range(len(value.shape)))
        self._tensors.append(value)
        storage = _StorageOf(len(self._tensors) - 1, value)
        return REBUILD_TENSOR, (storage, 0, value.shape, strides, False, OrderedDict())

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _StorageOf):
            return None
        return "storage", STORAGES[value.tensor.dtype], str(value.number), "cpu", math.prod(value.tensor.shape)


@dataclass(frozen=True)
class _StorageOf:
    number: int
    tensor: TensorStandIn


def _pickled(value: Any, tensors: list[TensorStandIn]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, tensors).dump(value)
    return file.getvalue()


def _sizes64(size: int) -> bytes:
    """The extra field of a local header for content that is too large for it."""
    return struct.pack("<HHQQ", 1, 16, size, size) if size >= LARGE else b""


def _short(value: int) -> int:
    return FULL if value >= LARGE else value


def _local_header(entry: Entry, crc: int) -> bytes:
    large, name = _sizes64(entry.size), entry.name.encode()
    short = FULL if large else entry.size
    padding = entry.start - entry.header - LOCAL.size - len(name) - len(large) - 4
    extra = large + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    return (
        LOCAL.pack(b"PK\3\4", 45 if large else 20, 0, 0, 0, 0, crc, short, short, len(name), len(extra)) + name + extra
    )


def _central_header(entry: Entry, crc: int) -> bytes:
    name = entry.name.encode()
    long = [value for value in (entry.size, entry.size, entry.header) if value >= LARGE]
    extra = struct.pack(f"<HH{len(long)}Q", 1, 8 * len(long), *long) if long else b""
    size, header = _short(entry.size), _short(entry.header)
    version = 45 if long else 20
    fixed = CENTRAL.pack(
        b"PK\1\2", version, version, 0, 0, 0, 0, crc, size, size, len(name), len(extra), 0, 0, 0, 0, header
    )
    return fixed + name + extra


def _end(entries: int, at: int, size: int) -> bytes:
    """The end of the central directory of `size` bytes at `at`; its 64-bit form too where needed."""
    large = b""
    if entries >= 0xFFFF or at + size >= LARGE:
        large = END64.pack(b"PK\6\6", END64.size - 12, 45, 45, 0, 0, entries, entries, size, at)
        large += LOCATOR.pack(b"PK\6\7", 0, at + size, 1)
    count = min(entries, 0xFFFF)
    return large + END.pack(b"PK\5\6", 0, 0, count, count, _short(size), _short(at), 0)
