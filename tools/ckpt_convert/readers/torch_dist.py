"""Megatron's torch_dist checkpoints, read without Megatron and torch.distributed: which bytes of which file hold what.

On disk: `.metadata` (a pickle: size, dtype and chunks per key, and the file, offset and length of each entry) and
`*.distcp` files of concatenated entries, each of which is an archive of torch.save that holds one chunk's raw bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from rlflow.errors import ConversionError, DamagedCheckpointError, ExitCode
from rlflow.storage.integrity import TRAINER_MANIFEST, read_fingerprints, read_sealed
from rlflow.storage.pickles import DAMAGE, Chunk, ForbiddenName, Inert, read_metadata

from ..dtypes import NAMED
from .arguments import described_layout, described_model
from .source import Content, Record, Stamps, StoredTensor, covers_once, identity_of
from .torch_archive import Archive, damaged, explained

COMMON = "common_state/shard_0_1"
"""The object that holds what common.pt held (megatron-core, dist_checkpointing/serialization.py, load_common_state_dict)."""


def locate(path: Path) -> Path:
    """The directory with the checkpoint's files: `path`, its `trainer`, the iteration that Megatron's tracker names, or the
    only checkpoint that lies in it."""
    if not path.is_dir():
        raise ConversionError(f"{path}: no such checkpoint directory.", ExitCode.MISSING)
    tracker = path / "latest_checkpointed_iteration.txt"
    if tracker.is_file() and not (path / ".metadata").exists():
        try:
            word = tracker.read_text(errors="replace").strip()[:100]
        except OSError as error:
            raise ConversionError(f"{tracker}: cannot be read ({error.strerror}).", ExitCode.DAMAGED) from None
        path = path / (f"iter_{int(word):07d}" if word.isascii() and word.isdigit() else word)
        if not re.fullmatch(r"\w+", word) or not path.is_dir():
            raise ConversionError(f"{tracker}: names '{word}', but {path.name}/ is not there.", ExitCode.MISSING)
    if (path / "trainer").is_dir() and not (path / ".metadata").exists():
        path = path / "trainer"
    if (path / ".metadata").is_file():
        return path
    if any(path.glob("mp_rank_*")):
        return path
    if any(path.glob("*.distcp")) or (path / "metadata.json").exists():
        raise ConversionError(
            f"{path}/.metadata: missing; it is written last, so the save was cut short.", ExitCode.MISSING
        )
    found = {*path.glob("*/.metadata"), *path.glob("*/mp_rank_*"), *path.glob("*/trainer/.metadata")}
    inside = sorted({file.relative_to(path).parts[0] for file in found})
    if len(inside) == 1:
        return locate(path / inside[0])
    if inside:
        raise ConversionError(f"{path}: holds several checkpoints; name one: {', '.join(inside)}.", ExitCode.MISSING)
    raise ConversionError(
        f"{path}: no checkpoint; expected .metadata and *.distcp files, or mp_rank_* directories.", ExitCode.UNSUPPORTED
    )


class TorchDist:
    """A checkpoint's tables, checked: every file there and long enough, every chunk stored once, no byte used twice.

    Raises ConversionError for a missing (3), damaged (4), unsupported (10) or hostile (11) checkpoint."""

    format = "torch_dist"
    copies: tuple[tuple[StoredTensor, StoredTensor], ...] = ()

    def __init__(self, path: str | Path) -> None:
        self.path = locate(Path(path))
        self.stamps = Stamps(self.path)
        self._check_backend()
        try:
            with (self.path / ".metadata").open("rb") as file:
                tables = read_metadata(file)
            self.tensors = {name: _stored(name, *entry) for name, entry in tables.tensors.items()}
            self._objects = tables.objects
        except ForbiddenName as error:
            raise ConversionError(f"{self.path}: {error}.", ExitCode.HOSTILE) from None
        except DAMAGE as error:
            raise damaged(self.path / ".metadata", error) from None
        self._check_extents(tables.extents)
        for stored in self.tensors.values():
            _check_cover(self.path, stored)
        self.common  # noqa: B018  a hostile common.pt is refused, whether needed or not

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """rlflow's own manifest: step, layout, model. Empty where another program wrote the checkpoint."""
        file = self.path / TRAINER_MANIFEST
        if not file.is_file():
            return {}
        try:
            value = read_sealed(file)
            files = read_fingerprints(value, file)
            if not isinstance(value["model"], dict) or not isinstance(value["layout"], dict):
                raise ValueError("model and layout are objects there")
        except DamagedCheckpointError as error:
            raise ConversionError(str(error), ExitCode.DAMAGED) from None
        except DAMAGE as error:
            raise damaged(file, error) from None
        for name, wanted in files.items():
            self._check_file(name, wanted.size, exact=True)
        return value

    @cached_property
    def common(self) -> dict[str, Any]:
        """common.pt, or the object that later versions of megatron-core have in its place, with stand-ins for objects; `args` is
        a dict of Megatron's arguments where it has them."""
        file, extent = self.path / "common.pt", self._objects.get(COMMON)
        if file.is_file():
            with explained(file), file.open("rb") as stream:
                value = Archive(stream).value
        elif extent is not None:
            name, start, length = extent
            with explained(self.path / name, f"'{COMMON}'"), (self.path / name).open("rb") as stream:
                found = Archive(stream, start, length).value
            value = found[0] if isinstance(found, list) and found else None
        else:
            return {}
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
    def arguments(self) -> Mapping[str, Any]:
        """Megatron's arguments, as far as the files have them."""
        return self.common.get("args") or {}

    @property
    def described(self) -> dict[str, Any]:
        """What the files say of the model, by field of Architecture."""
        return {**self.manifest.get("model", {}), **described_model(self.common.get("args") or {})}

    def records(self) -> Iterator[tuple[str, Record]]:
        """Nothing: each chunk has its own checksum."""
        return iter(())

    def identity(self) -> dict[str, Any]:
        """See `TensorSource.identity`."""
        tables = [
            name
            for name in (".metadata", "metadata.json", "common.pt", TRAINER_MANIFEST)
            if (self.path / name).is_file()
        ]
        return identity_of(
            self.path, {chunk.file for tensor in self.tensors.values() for chunk in tensor.chunks}, tables
        )

    def content(self, stored: StoredTensor, chunk: Chunk) -> Content:
        """Where the raw bytes of an chunk are. Raises ConversionError (4) unless its archive holds just that chunk."""
        file = self.path / chunk.file
        with explained(file, f"'{stored.name}' at byte {chunk.start}"), file.open("rb") as stream:
            return _content(Archive(stream, chunk.start, chunk.length), stored, chunk)

    def _check_backend(self) -> None:
        file = self.path / "metadata.json"
        if not file.is_file():
            raise ConversionError(f"{file}: missing; a torch_dist checkpoint has it.", ExitCode.MISSING)
        try:
            backend = json.loads(file.read_text())["sharded_backend"]
        except DAMAGE as error:
            raise damaged(file, error) from None
        if backend != "torch_dist":
            raise ConversionError(
                f"{file}: checkpoint format '{backend}' is not supported; expected 'torch_dist'.", ExitCode.UNSUPPORTED
            )

    def _check_extents(self, extents: Iterable[tuple[str, int, int]]) -> None:
        end: dict[str, int] = {}
        for name, start, length in sorted(extents):
            if start < end.get(name, 0) or length <= 0 or not re.fullmatch(r"[\w.-]+", name):
                raise ConversionError(
                    f"{self.path}/.metadata: damaged; the entries of {name!r} overlap at byte {start}.",
                    ExitCode.DAMAGED,
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


def _content(archive: Archive, stored: StoredTensor, chunk: Chunk) -> Content:
    window = archive.window(archive.value)
    if window is None or window.dtype is not stored.dtype or window.shape != chunk.sizes:
        raise ValueError(f"expected {stored.dtype} {chunk.sizes}, found {window}")
    if window.nbytes != window.record.bytes:
        raise ValueError(f"{window.nbytes} bytes expected, {window.record.bytes} stored")
    return Content(window.start, window.nbytes, window.record.crc32)


def _stored(name: str, shape: tuple[int, ...], dtype: str, chunks: tuple[Chunk, ...]) -> StoredTensor:
    if dtype not in NAMED:
        raise ValueError(f"'{name}' has the unknown dtype {dtype!r}")
    return StoredTensor(name, shape, NAMED[dtype], chunks)


def _check_cover(path: Path, stored: StoredTensor) -> None:
    """Chunks lie inside the tensor, do not overlap, and have as many elements together."""
    if not covers_once([tuple(zip(chunk.offsets, chunk.sizes)) for chunk in stored.chunks], stored.shape):
        raise ConversionError(
            f"{path}/.metadata: damaged; the chunks of '{stored.name}' do not make up its shape {stored.shape}.",
            ExitCode.DAMAGED,
        )
