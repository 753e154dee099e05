"""Megatron's torch_dist checkpoints, read without Megatron and torch.distributed: which bytes of which file hold what.

On disk: `.metadata` (a pickle: size, dtype and chunks per key, and the file, offset and length of each item) and
`*.distcp` files of concatenated items, each of which is an archive of torch.save that holds one chunk's raw bytes."""

from __future__ import annotations

import io
import json
import math
import os
import re
import struct
import zipfile
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from rlflow.errors import ConversionError, ExitCode
from rlflow.weights.arguments import described_layout, described_model
from rlflow.weights.pickles import DAMAGE, DTYPES, Chunk, ForbiddenName, Inert, InertUnpickler, Storage, read_metadata
from rlflow.weights.plan import tiles
from rlflow.weights.source import Content, Item, Stored, identity_of

STORAGES = {
    "FloatStorage": torch.float32,
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
    "DoubleStorage": torch.float64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ByteStorage": torch.uint8,
}
LOCAL_HEADER = struct.Struct("<26xHH")
"""Of a zip's entry: the lengths of name and extra field at byte 26; the content follows them."""


def locate(path: Path) -> Path:
    """The directory with the checkpoint's files: `path`, its `trainer`, or the iteration that Megatron's tracker names."""
    if not path.is_dir():
        raise ConversionError(f"{path}: no such checkpoint directory.", ExitCode.MISSING)
    tracker = path / "latest_checkpointed_iteration.txt"
    if tracker.is_file() and not (path / ".metadata").exists():
        word = tracker.read_text(errors="replace").strip()
        path = path / (f"iter_{int(word):07d}" if word.isdigit() else word)
        if not path.is_dir():
            raise ConversionError(f"{tracker}: names '{word}', but {path.name}/ is not there.", ExitCode.MISSING)
    if (path / "trainer").is_dir() and not (path / ".metadata").exists():
        path = path / "trainer"
    if (path / ".metadata").is_file():
        return path
    if any(path.glob("mp_rank_*")):
        what = "a legacy checkpoint (mp_rank_*), which is not read yet; save it as torch_dist"
        raise ConversionError(f"{path}: {what}.", ExitCode.UNSUPPORTED)
    inside = sorted(one.parent.name for one in path.glob("*/.metadata")) or sorted(
        one.parent.parent.name for one in path.glob("*/trainer/.metadata")
    )
    if inside:
        raise ConversionError(f"{path}: holds several checkpoints; name one: {', '.join(inside)}.", ExitCode.MISSING)
    if any(path.glob("*.distcp")) or (path / "metadata.json").exists():
        raise ConversionError(
            f"{path}/.metadata: missing; it is written last, so the save was cut short.", ExitCode.MISSING
        )
    raise ConversionError(f"{path}: no checkpoint; expected .metadata and *.distcp files.", ExitCode.UNSUPPORTED)


class TorchDist:
    """A checkpoint's tables, checked: every file there and long enough, every chunk stored once, no byte used twice.

    Raises ConversionError for a missing (3), damaged (4), unsupported (10) or hostile (11) checkpoint."""

    format = "torch_dist"

    def __init__(self, path: str | Path) -> None:
        self.path = locate(Path(path))
        self._check_backend()
        try:
            with (self.path / ".metadata").open("rb") as file:
                tables = read_metadata(file)
            self.tensors = {name: _stored(name, *entry) for name, entry in tables.tensors.items()}
        except ForbiddenName as error:
            raise ConversionError(f"{self.path}: {error}.", ExitCode.HOSTILE) from None
        except DAMAGE as error:
            raise _damaged(self.path / ".metadata", error) from None
        self._check_extents(tables.extents)
        for stored in self.tensors.values():
            _check_cover(self.path, stored)
        self.common  # noqa: B018  a hostile common.pt is refused, whether needed or not

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """rlflow's own trainer.json: step, layout, model. Empty where another program wrote the checkpoint."""
        file = self.path / "trainer.json"
        if not file.is_file():
            return {}
        try:
            value = json.loads(file.read_text())
            sizes = {str(name): int(size) for name, size in value["files"].items()}
            if not isinstance(value["model"], dict) or not isinstance(value["layout"], dict):
                raise ValueError("model and layout are objects there")
        except DAMAGE as error:
            raise _damaged(file, error) from None
        for name, size in sizes.items():
            self._check_file(name, size, exact=True)
        return value

    @cached_property
    def common(self) -> dict[str, Any]:
        """common.pt with stand-ins for objects; `args` is a dict of Megatron's arguments where it has them."""
        file = self.path / "common.pt"
        if not file.is_file():
            return {}
        try:
            with zipfile.ZipFile(file) as archive:
                name = next(one for one in archive.namelist() if one.endswith("/data.pkl"))
                value = InertUnpickler(io.BytesIO(archive.read(name))).load()
        except ForbiddenName as error:
            raise ConversionError(f"{file}: {error}.", ExitCode.HOSTILE) from None
        except (*DAMAGE, zipfile.BadZipFile, StopIteration) as error:
            raise _damaged(file, error) from None
        if not isinstance(value, dict):
            return {}
        args = value.get("args")
        return {**value, "args": args.state if isinstance(args, Inert) and isinstance(args.state, dict) else {}}

    @property
    def iteration(self) -> int | None:
        """The training step that the checkpoint was saved after, as far as its files tell."""
        found = self.manifest.get("step", self.common.get("iteration"))
        return found if isinstance(found, int) else None

    @property
    def layout(self) -> dict[str, int]:
        """Ranks by kind (`tensor_parallel`, ...) of the run that saved it, as far as its files tell."""
        return {**described_layout(self.common.get("args") or {}), **self.manifest.get("layout", {})}

    @property
    def described(self) -> dict[str, Any]:
        """What the files say of the model, by field of Architecture."""
        return {**self.manifest.get("model", {}), **described_model(self.common.get("args") or {})}

    def identity(self) -> dict[str, Any]:
        """See `Source.identity`."""
        tables = [
            name for name in (".metadata", "metadata.json", "common.pt", "trainer.json") if (self.path / name).is_file()
        ]
        return identity_of(self.path, {item.file for one in self.tensors.values() for item in one.items}, tables)

    def content(self, stored: Stored, item: Item) -> Content:
        """Where the raw bytes of an item are. Raises ConversionError (4) unless its archive holds just that chunk."""
        file = self.path / item.file
        try:
            with file.open("rb") as stream:
                part = _Part(stream, item.start, item.length)
                with zipfile.ZipFile(part) as archive:
                    return _content(archive, part, stored, item)
        except ForbiddenName as error:
            raise ConversionError(f"{file}: {error}.", ExitCode.HOSTILE) from None
        except (*DAMAGE, zipfile.BadZipFile, StopIteration) as error:
            raise _damaged(file, error, f"'{stored.name}' at byte {item.start}") from None

    def _check_backend(self) -> None:
        file = self.path / "metadata.json"
        if not file.is_file():
            raise ConversionError(f"{file}: missing; a torch_dist checkpoint has it.", ExitCode.MISSING)
        try:
            backend = json.loads(file.read_text())["sharded_backend"]
        except DAMAGE as error:
            raise _damaged(file, error) from None
        if backend != "torch_dist":
            raise ConversionError(
                f"{file}: checkpoint format '{backend}' is not supported; expected 'torch_dist'.", ExitCode.UNSUPPORTED
            )

    def _check_extents(self, extents: Iterable[tuple[str, int, int]]) -> None:
        end: dict[str, int] = {}
        for name, start, length in sorted(extents):
            if start < end.get(name, 0) or length <= 0 or not re.fullmatch(r"[\w.-]+", name):
                raise ConversionError(
                    f"{self.path}/.metadata: damaged; the items of {name!r} overlap at byte {start}.", ExitCode.DAMAGED
                )
            end[name] = start + length
        for name, size in end.items():
            self._check_file(name, size)

    def _check_file(self, name: str, size: int, exact: bool = False) -> None:
        file = self.path / name
        if not file.is_file():
            there = len(list(self.path.glob("*.distcp")))
            raise ConversionError(
                f"{file}: missing ({there} *.distcp files found); copy the whole checkpoint.", ExitCode.MISSING
            )
        found = file.stat().st_size
        if found < size or (exact and found != size):
            raise ConversionError(f"{file}: {found} bytes found, {size} expected; copy it again.", ExitCode.DAMAGED)


class _Part(io.RawIOBase):
    """A byte range of a file as a file of its own."""

    def __init__(self, stream: Any, start: int, length: int) -> None:
        super().__init__()
        self._stream, self._start, self._length, self._at = stream, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        if self._at < 0:
            raise OSError("negative position")
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(self._length - self._at, 0)
        wanted = left if size is None or size < 0 else min(size, left)
        found = os.pread(self._stream.fileno(), wanted, self._start + self._at)
        self._at += len(found)
        return found


def _content(archive: zipfile.ZipFile, part: _Part, stored: Stored, item: Item) -> Content:
    entries = {one.filename.split("/", 1)[1]: one for one in archive.infolist()}
    tensor = InertUnpickler(io.BytesIO(archive.read(entries["data.pkl"]))).load()
    if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
        raise ValueError("the bytes are not little-endian")
    storage, offset, size, stride = tensor.arguments[:4]
    dtype = STORAGES.get(storage.kind) if isinstance(storage, Storage) else None
    contiguous = tuple(math.prod(item.sizes[axis + 1 :]) for axis in range(len(item.sizes)))
    steps = [(one, two) for one, two, length in zip(stride, contiguous, item.sizes) if length > 1]
    if dtype is not stored.dtype or tuple(size) != item.sizes or offset != 0 or any(one != two for one, two in steps):
        raise ValueError(f"expected {stored.dtype} {item.sizes}, rows one after another; found {storage} {tuple(size)}")
    entry = entries[f"data/{storage.key}"]
    needed = math.prod(item.sizes) * stored.dtype.itemsize
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != needed or entry.compress_size != needed:
        raise ValueError(f"{needed} bytes expected, {entry.file_size} stored")
    part.seek(entry.header_offset)
    header = part.read(30)
    name, extra = LOCAL_HEADER.unpack(header)
    begin = entry.header_offset + 30 + name + extra
    if header[:4] != b"PK\x03\x04" or begin + needed > item.length:
        raise ValueError("the content lies outside its archive")
    return Content(item.start + begin, needed, entry.CRC)


def _stored(name: str, shape: tuple[int, ...], dtype: str, chunks: tuple[Chunk, ...]) -> Stored:
    if dtype not in DTYPES:
        raise ValueError(f"'{name}' has the unknown dtype {dtype!r}")
    items = tuple(Item(one.offsets, one.sizes, one.file, one.start, one.length) for one in chunks)
    return Stored(name, shape, getattr(torch, dtype), items)


def _check_cover(path: Path, stored: Stored) -> None:
    """Chunks lie inside the tensor, do not overlap, and have as many elements together."""
    if not tiles([tuple(zip(item.offsets, item.sizes)) for item in stored.items], stored.shape):
        raise ConversionError(
            f"{path}/.metadata: damaged; the chunks of '{stored.name}' do not make up its shape {stored.shape}.",
            ExitCode.DAMAGED,
        )


def _damaged(file: Path, error: BaseException, where: str = "") -> ConversionError:
    reason = (str(error).strip().splitlines() or ["no reason given"])[0][:200]
    place = f", {where}" if where else ""
    return ConversionError(
        f"{file}{place}: damaged ({type(error).__name__}: {reason}); copy it again or use an earlier checkpoint.",
        ExitCode.DAMAGED,
    )
