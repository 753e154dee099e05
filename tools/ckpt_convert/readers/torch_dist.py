"""Megatron's torch_dist checkpoints, read without Megatron and torch.distributed.

On disk: `.metadata` (a pickle: size, dtype and chunks per key, and the file, offset and length of
each entry) and `*.distcp` files of concatenated entries, each of which is an archive of torch.save
that holds one chunk's raw bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlflow.errors import DamagedCheckpointError
from rlflow.storage.integrity import TRAINER_MANIFEST, read_fingerprints, read_sealed
from rlflow.storage.pickles import Chunk, InertUnpickler, Table, origin_of, read_metadata

from ..dtypes import NAMED
from ..problems import damaged, missing, unsupported
from .arguments import described_layout, described_model, told
from .source import ChunkPlace, Stamps, StoredTensor, TensorSource, covers_once
from .torch_archive import Archive, explained

COMMON = "common_state/shard_0_1"
"""The object that holds what common.pt held (megatron-core, dist_checkpointing/serialization.py,
load_common_state_dict)."""
TABLES = (".metadata", "metadata.json", "common.pt", TRAINER_MANIFEST)


def read_torch_dist(path: Path) -> TensorSource:
    """The checked tables of a directory: every file there and long enough, every chunk stored once,
    no byte used twice.

    Raises ConversionError for a missing (3), damaged (4), unsupported (10) or hostile (11)
    checkpoint."""
    stamps = Stamps(path)
    _check_backend(path / "metadata.json")
    tables, tensors = _read_tables(path / ".metadata")
    _check_extents(path, tables.extents)
    for stored in tensors.values():
        _check_cover(path, stored)
    common, passed_over = _common(path, tables)
    manifest = _manifest(path)
    args, iteration = told(common)

    places: dict[Chunk, ChunkPlace] = {}

    def place_of(stored: StoredTensor, chunk: Chunk) -> ChunkPlace:
        if chunk not in places:
            file, where = path / chunk.file, f"'{stored.name}' at byte {chunk.start}"
            with explained(file, where), file.open("rb") as stream:
                archive = Archive(stream, chunk.file, chunk.start, chunk.length)
                places[chunk] = _place(archive, stored, chunk)
        return places[chunk]

    return TensorSource(
        path=path,
        format="torch_dist",
        tensors=tensors,
        place_of=place_of,
        stamps=stamps,
        tables=tuple(name for name in TABLES if (path / name).is_file()),
        iteration=manifest.get("step", iteration),
        layout={**described_layout(args), **manifest.get("layout", {})},
        arguments=args,
        described={**manifest.get("model", {}), **described_model(args)},
        manifest=manifest,
        passed_over=tuple(sorted(tables.passed_over | passed_over)),
    )


def _read_tables(file: Path) -> tuple[Table, dict[str, StoredTensor]]:
    with explained(file), file.open("rb") as stream:
        tables = read_metadata(stream, InertUnpickler)
        return tables, {
            name: StoredTensor(name, shape, NAMED[kind], chunks)
            for name, (shape, kind, chunks) in tables.tensors.items()
        }


def _manifest(path: Path) -> dict[str, Any]:
    """rlflow's own manifest: step, layout, model. Empty where another program wrote the
    checkpoint."""
    file = path / TRAINER_MANIFEST
    if not file.is_file():
        return {}
    try:
        value = read_sealed(file)
        files = read_fingerprints(value, file)
    except DamagedCheckpointError as error:
        raise damaged(str(error)) from None
    if not isinstance(value.get("model"), dict) or not isinstance(value.get("layout"), dict):
        raise damaged(f"{file}: damaged; model and layout are objects there.")
    for name, wanted in files.items():
        _check_size(path / name, wanted.size, exact=True)
    return value


def _common(path: Path, tables: Table) -> tuple[dict[str, Any], set[str]]:
    """common.pt, or the object that later versions of megatron-core have in its place, with
    stand-ins for objects; and the names of those that were passed over."""
    place = ("common.pt",) if (path / "common.pt").is_file() else tables.objects.get(COMMON)
    if place is None:
        return {}, set()
    file = path / place[0]
    with explained(file), file.open("rb") as stream:
        archive = Archive(stream, *place)
        value = archive.value
    value = value[0] if isinstance(value, list) and value else value
    return value if isinstance(value, dict) else {}, archive.passed_over


def _place(archive: Archive, stored: StoredTensor, chunk: Chunk) -> ChunkPlace:
    """Where a chunk's elements are. Raises ValueError unless its archive holds just that chunk."""
    window = archive.window(archive.value)
    if window is None or (window.dtype, window.shape) != (stored.dtype, chunk.sizes):
        present = origin_of(archive.value)[:200] if window is None else window
        raise ValueError(
            f"expected a tensor, {stored.dtype} {chunk.sizes}, found {present or 'no tensor'}"
        )
    if window.nbytes != window.record.length:
        raise ValueError(f"{window.nbytes} bytes expected, {window.record.length} stored")
    return ChunkPlace(window.start, window.record)


def _check_backend(file: Path) -> None:
    if not file.is_file():
        raise missing(
            f"{file}: missing; Megatron's torch_dist checkpoints have it. Copy the whole "
            "checkpoint; one of torch.distributed.checkpoint alone (FSDP) is not read."
        )
    with explained(file):
        backend = json.loads(file.read_text())["sharded_backend"]
    if backend != "torch_dist":
        raise unsupported(
            f"{file}: checkpoint format '{backend}' is not supported; expected 'torch_dist'."
        )


def _check_extents(path: Path, extents: Iterable[tuple[str, int, int]]) -> None:
    end: dict[str, int] = {}
    for name, start, length in sorted(extents):
        if start < end.get(name, 0) or length <= 0 or not re.fullmatch(r"[\w.-]+", name):
            raise damaged(
                f"{path}/.metadata: damaged; the entries of {name!r} overlap at byte {start}."
            )
        end[name] = start + length
    for name, size in end.items():
        _check_size(path / name, size)


def _check_size(file: Path, size: int, exact: bool = False) -> None:
    if not file.is_file():
        there = len(list(file.parent.glob("*.distcp")))
        raise missing(f"{file}: missing ({there} *.distcp files found); copy the whole checkpoint.")
    found = file.stat().st_size
    if found < size or (exact and found != size):
        raise damaged(f"{file}: {found} bytes found, {size} expected; copy it again.")


def _check_cover(path: Path, stored: StoredTensor) -> None:
    """Chunks lie inside the tensor, do not overlap, and make up the whole of it."""
    boxes = [tuple(zip(chunk.offsets, chunk.sizes)) for chunk in stored.chunks]
    if not covers_once(boxes, stored.shape):
        raise damaged(
            f"{path}/.metadata: damaged; the chunks of '{stored.name}' do not make up its shape "
            f"{stored.shape}."
        )
