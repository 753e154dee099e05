"""`--verify full` of an export: what was written, mapped back to the tensors that it came from."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from rlflow.errors import ConversionError, ExitCode
from rlflow.models.huggingface import WeightFiles
from rlflow.models.rules import Split
from rlflow.models.sharding import shard as to_megatron

from .mapping.plan import View
from .mapping.to_huggingface import Export
from .readers.source import TensorSource
from .verify import check_records


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
        whole = torch.frombuffer(data, dtype=getattr(torch, view.stored.dtype.name))
        elements = whole[rectangle.skipped : rectangle.skipped + rectangle.rows * rectangle.columns]
        yield elements.view(rectangle.rows, rectangle.columns), rectangle.row, rectangle.column


def _same_bytes(first: Tensor, second: Tensor) -> bool:
    views = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (first, second)]
    return first.shape == second.shape and torch.equal(*views)
