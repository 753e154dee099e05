"""Files of torch.save, or parts of files: their value with stand-ins for objects, and where the
tensors' bytes are.

Such a file is a zip archive that is not compressed: `data.pkl`, and one entry per storage. A tensor
is a window of a storage, so several tensors may share one (Megatron's parameters may be windows of
one large buffer).

torch.load(weights_only=True, mmap=True) does not serve here (torch 2.13):

- Other programs' checkpoints hold objects beside the weights (Megatron's arguments, OmegaConf).
  torch refuses a file whose names are not registered one by one, as importable classes; here each
  name has a stand-in, and nothing is imported.
- A chunk of a torch_dist checkpoint is an archive within a larger file, and torch maps whole files
  alone.
- It gives tensors. A conversion copies ranges of bytes by the kernel and verifies their CRC-32:
  of a storage with a flipped byte torch.load says nothing.
- Importing torch costs 2 s and 190 MiB, in each process that reads; tables take it 2.5 times as
  long.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import IO, Any

from rlflow.errors import described
from rlflow.storage.pickles import (
    DAMAGE,
    ForbiddenName,
    Inert,
    InertUnpickler,
    Storage,
    origin_of,
)

from ..dtypes import NAMED, DType
from ..problems import damaged, hostile
from .source import Record

STORAGES = {dtype.storage: dtype for dtype in NAMED.values()}
PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
MOST_AXES = 64
"""Of a tensor of torch."""


@dataclass(frozen=True)
class Window:
    """A tensor of an archive, its rows one after another. start: its first byte within the file.
    record: its storage."""

    dtype: DType
    shape: tuple[int, ...]
    start: int
    record: Record

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Archive:
    """An archive in the bytes [start, start + length) of an open file. Reads tables only, never the
    tensors' bytes.

    Raises what DAMAGE and zipfile list for a damaged one, and ForbiddenName; `explained` puts both
    into words."""

    def __init__(
        self, stream: IO[bytes], name: str, start: int = 0, length: int | None = None
    ) -> None:
        self._name, self._start = name, start
        self._length = os.fstat(stream.fileno()).st_size if length is None else length
        self._part = _Part(stream.fileno(), start, self._length)
        self._zip = zipfile.ZipFile(self._part)
        entries = self._zip.infolist()
        self._entries = {entry.filename.split("/", 1)[1]: entry for entry in entries}
        self.pickle = self._content("data.pkl")
        if "byteorder" in self._entries and self._content("byteorder") != b"little":
            raise ValueError("the bytes are not little-endian")
        self._unpickler = InertUnpickler(io.BytesIO(self.pickle))
        self._record = cache(self._locate)

    @cached_property
    def value(self) -> Any:
        """What was saved, with `Inert` in place of every object but Python's own."""
        return self._unpickler.load()

    @property
    def passed_over(self) -> set[str]:
        """The names in `value` that a checkpoint does not have as a matter of course."""
        return self._unpickler.passed_over

    def window(self, tensor: Any) -> Window | None:
        """Where a tensor of `value` lies; None for what is no tensor. Raises ValueError unless its
        bytes are one run."""
        tensor = _without_attributes(tensor)
        if origin_of(tensor) != "torch._utils._rebuild_tensor_v2":
            return None
        storage, offset, size, stride = tensor.arguments[:4]
        if not isinstance(storage, Storage) or not isinstance(offset, int):
            raise ValueError("a tensor without a storage")
        dtype = STORAGES.get(storage.kind)
        shape = tuple(map(int, size.arguments[0] if isinstance(size, Inert) else size))
        if len(shape) > MOST_AXES:
            raise ValueError(f"a tensor of {len(shape)} axes")
        regular = _contiguous(shape, stride) and offset >= 0 and min(shape, default=1) >= 0
        if dtype is None or not regular:
            raise ValueError(
                "expected a tensor of floating point, rows one after another; found "
                f"{storage} {shape}"
            )
        record = self._record(storage.key)
        window = Window(dtype, shape, record.start + offset * dtype.itemsize, record)
        if window.start + window.nbytes > record.start + record.length:
            raise ValueError(
                f"{window.nbytes} bytes expected from {offset} on, {record.length} stored"
            )
        return window

    def _content(self, name: str) -> bytes:
        entry = self._entries[name]
        if entry.compress_type != zipfile.ZIP_STORED:  # so that it is not larger than the file
            raise ValueError(f"{name} is compressed")
        return self._zip.read(entry)

    def _locate(self, key: str) -> Record:
        """The bytes of a storage."""
        entry = self._entries[f"data/{key}"]
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise ValueError("the storages are compressed")
        with self._zip.open(entry):  # reads the entry's own header, which its bytes follow
            begin = self._part.tell()
        if begin + entry.file_size > self._length:
            raise ValueError("the content lies outside its archive")
        return Record(self._name, self._start + begin, entry.file_size, entry.CRC)


@contextlib.contextmanager
def explained(file: Path, where: str = "") -> Iterator[None]:
    """Inside, what a damaged or hostile archive raises becomes a ConversionError (4, 11)."""
    try:
        yield
    except ForbiddenName as error:
        raise hostile(f"{file}: {error}.") from None
    except (*DAMAGE, zipfile.BadZipFile, StopIteration) as error:
        place = f", {where}" if where else ""
        raise damaged(
            f"{file}{place}: damaged ({described(error)[:200]}); copy it again or use an earlier "
            "checkpoint."
        ) from None


def _without_attributes(value: Any) -> Any:
    """The tensor that a parameter is made of, or one that was saved with attributes
    (torch/_tensor.py, Tensor.__reduce_ex__)."""
    if origin_of(value) == "torch._tensor._rebuild_from_type_v2":
        function, _, arguments, _ = value.arguments
        if origin_of(function).startswith("torch._utils."):
            value = function(*arguments)  # a stand-in again
    if origin_of(value) in PARAMETERS:
        value = value.arguments[0]
    return value


def _contiguous(shape: Sequence[int], stride: Any) -> bool:
    steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    lengths = zip(stride, steps, shape)
    same = (found == expected for found, expected, length in lengths if length > 1)
    return len(stride) == len(shape) and all(same)


class _Part(io.RawIOBase):
    """A byte range of a file as a file of its own."""

    def __init__(self, descriptor: int, start: int, length: int) -> None:
        super().__init__()
        self._descriptor, self._start, self._length = descriptor, start, length
        self._at = 0

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        if self._at < 0:
            raise OSError("negative position")
        return self._at

    def readinto(self, out: Any) -> int:
        wanted = max(0, min(len(out), self._length - self._at))
        found = os.preadv(self._descriptor, [memoryview(out)[:wanted]], self._start + self._at)
        self._at += found
        return found
