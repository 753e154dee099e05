"""Checkpoints of a run with `trainer.lora`, which hold adapters alone: read, and merged into the weights that they belong to."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.errors import ConversionError, ExitCode, ModelError

from .dtypes import NAMED
from .readers.source import StoredTensor, TensorSource

if TYPE_CHECKING:
    from torch import Tensor

KEYS = "lora."
"""What the keys of adapters begin with in a checkpoint of rlflow."""


def description(source: TensorSource) -> dict[str, Any] | None:
    """rank, alpha, the trainer's dtype, and as `base` the content hash of the weights that the adapters belong to; None for a
    checkpoint of whole weights."""
    manifest = getattr(source, "manifest", {})
    found = manifest.get("lora")
    if found is None:
        return None
    try:
        return {
            "rank": int(found["rank"]),
            "alpha": float(found["alpha"]),
            "base": str(found["base"]),
            "dtype": NAMED[manifest["dtype"]].name,
        }
    except (KeyError, TypeError, ValueError):
        raise ConversionError(
            f"{source.path}: damaged; its manifest does not describe its adapters.", ExitCode.DAMAGED
        ) from None


def merge(source: TensorSource, out: Path, reference: Path, origin: dict[str, Any], overwrite: bool) -> dict[str, Any]:
    """Writes the HuggingFace directory of the adapters and their base, the directory `reference`; returns its manifest.

    Raises ConversionError: adapters of other weights (7), damage (4)."""
    import torch

    from rlflow.models.adapter import Adapter, merged_model
    from rlflow.models.export import write_model
    from rlflow.models.huggingface import digest, iterate_weights

    told = description(source)
    assert told is not None, "it holds whole weights"
    if digest(iterate_weights(reference)) != told["base"]:
        raise ConversionError(
            f"{source.path}: holds LoRA adapters of other weights than those of {reference}; give the model directory that the "
            "training began from.",
            ExitCode.OTHER_MODEL,
        )
    factors = {
        name.removeprefix(KEYS): _whole(source, stored)
        for name, stored in source.tensors.items()
        if name.startswith(KEYS)
    }
    try:
        adapter = Adapter.of(factors.items(), told["alpha"] / told["rank"], str(source.path))
        return write_model(
            out,
            merged_model(adapter, reference, getattr(torch, told["dtype"])),
            reference,
            overwrite=overwrite,
            source=origin,
        )
    except ModelError as error:
        raise ConversionError(str(error), ExitCode.OTHER_MODEL) from None


def _whole(source: TensorSource, stored: StoredTensor) -> Tensor:
    """The tensor in memory. Raises ConversionError (4) where a chunk is not what its checksum says."""
    import torch

    dtype = getattr(torch, stored.dtype.name)
    whole = torch.empty(stored.shape, dtype=dtype)
    for chunk in stored.chunks:
        place = source.content(stored, chunk)
        with (source.path / chunk.file).open("rb") as file:
            raw = os.pread(file.fileno(), place.bytes, place.start)
        if len(raw) != place.bytes or (place.crc32 is not None and zlib.crc32(raw) != place.crc32):
            raise ConversionError(
                f"{source.path / chunk.file}: '{stored.name}' is damaged (checksum).", ExitCode.DAMAGED
            )
        part = torch.frombuffer(bytearray(raw), dtype=dtype).view(chunk.sizes)
        whole[tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))] = part
    return whole
