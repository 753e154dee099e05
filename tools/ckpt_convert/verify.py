"""Checks of what was written: against its manifest, and mapped back to the tensors that it came from."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlflow.errors import ConversionError, DamagedCheckpointError, ExitCode, ModelError
from rlflow.models.huggingface import WeightFiles, check_tensors
from rlflow.models.rules import Split
from rlflow.models.sharding import shard as to_megatron
from rlflow.storage.integrity import EXPORT_MANIFEST, Fingerprint, find_damage, read_fingerprints, read_sealed

from .mapping.plan import View
from .mapping.to_huggingface import Export
from .readers.source import TensorSource

READ_BYTES = 4 << 20


def read_manifest(path: Path) -> tuple[dict[str, Any], dict[str, Fingerprint]]:
    """(manifest, what its files must look like) of a directory that an export or a conversion wrote. Raises
    ConversionError (3: none, 4: damaged)."""
    file = path / EXPORT_MANIFEST
    if not file.is_file():
        raise ConversionError(
            f"{file}: missing; only directories written by a conversion can be verified.", ExitCode.MISSING
        )
    try:
        manifest = read_sealed(file)
        return manifest, read_fingerprints(manifest)
    except DamagedCheckpointError as error:
        raise ConversionError(f"{str(error).removesuffix('.')}; export again.", ExitCode.DAMAGED) from None


def verify_export(path: str | Path, workers: int = 2) -> dict[str, Any]:
    """The manifest of an export, every file of which has the size and checksums that it says, and whose tensors are those
    that config.json implies. Raises ConversionError (3: a file is missing, 4: another content)."""
    path = Path(path)
    manifest, expected = read_manifest(path)
    with ThreadPoolExecutor(workers) as pool:
        for damage in filter(None, pool.map(lambda name: find_damage(path, expected, [name]), expected)):
            gone = any(not (path / name).is_file() for name in expected)
            raise ConversionError(f"{damage}; export again.", ExitCode.MISSING if gone else ExitCode.DAMAGED)
    foreign = sorted(file.name for file in path.glob("*.safetensors") if file.name not in expected)
    if foreign:
        raise ConversionError(f"{path / foreign[0]}: not part of the export; remove it.", ExitCode.DAMAGED)
    if (path / "config.json").is_file():
        try:
            check_tensors(path)
        except ModelError as error:
            raise ConversionError(str(error), ExitCode.DAMAGED) from None
    return manifest


def check_inverse(source: TensorSource, export: Export, directory: Path) -> None:
    """Raises ConversionError (4) unless the written tensors, mapped back to Megatron's, are the checkpoint's bytes.

    Maps whole tensors with the trainer's own `models.sharding.shard`, not with the rectangles that wrote them, and checks the
    checksums that the checkpoint's archives hold. Memory: a few times the largest tensor."""
    check_records(source)
    files = WeightFiles(directory)
    for rule, layer, view in export.sources:
        tensors = [files[name] for name in rule.names(layer)]
        mapped = to_megatron(rule, tensors, export.model, 0, 1)
        mapped = mapped.view(mapped.shape[0], -1)
        for found, row, column in _stored_parts(source, view):
            expected = mapped[row : row + found.shape[0], column : column + found.shape[1]]
            if rule.split is Split.VOCAB:  # rows of padding are dropped
                found = found[: expected.shape[0]]
            if not _same_bytes(found.to(mapped.dtype), expected):
                raise ConversionError(
                    f"{directory}: '{rule.names(layer)[0]}' does not map back to '{view.stored.name}' (chunk at row "
                    f"{row}); the checkpoint changed while it was read, or this is a bug.",
                    ExitCode.DAMAGED,
                )


def check_records(source: TensorSource) -> None:
    """Raises ConversionError (4) where bytes of a source are not what its checksums say, those of single chunks apart."""
    for name, record in source.records():
        found = 0
        with (source.path / name).open("rb") as stream:
            stream.seek(record.start)
            for start in range(0, record.bytes, READ_BYTES):
                found = zlib.crc32(stream.read(min(READ_BYTES, record.bytes - start)), found)
        if found != record.crc32:
            raise ConversionError(
                f"{source.path / name}: {record.bytes} bytes at byte {record.start} are damaged (checksum); copy it again "
                "or use an earlier checkpoint.",
                ExitCode.DAMAGED,
            )


def _stored_parts(source: TensorSource, view: View) -> Iterator[tuple[Tensor, int, int]]:
    """(matrix, first row, first column) of every chunk of a view."""
    for rectangle in view.rectangles():
        content = source.content(view.stored, rectangle.chunk)
        with (source.path / rectangle.chunk.file).open("rb") as stream:
            stream.seek(content.start)
            data = bytearray(stream.read(content.bytes))
        if len(data) != content.bytes or (content.crc32 is not None and zlib.crc32(data) != content.crc32):
            raise ConversionError(
                f"{source.path / rectangle.chunk.file}: '{view.stored.name}' at byte {content.start} is damaged (checksum); "
                "copy it again or use an earlier checkpoint.",
                ExitCode.DAMAGED,
            )
        whole = torch.frombuffer(data, dtype=view.stored.dtype)
        elements = whole[rectangle.skipped : rectangle.skipped + rectangle.rows * rectangle.columns]
        yield elements.view(rectangle.rows, rectangle.columns), rectangle.row, rectangle.column


def _same_bytes(first: Tensor, second: Tensor) -> bool:
    views = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (first, second)]
    return first.shape == second.shape and torch.equal(*views)
