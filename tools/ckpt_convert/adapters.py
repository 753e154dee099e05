"""Checkpoints of a run with `trainer.lora`: adapters, to be merged into the weights that they
belong to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.errors import ModelError

from .dtypes import NAMED
from .mapping.plan import View
from .options import Options
from .problems import damaged, other_model
from .readers.source import TensorSource
from .stream import Reader, check_records

if TYPE_CHECKING:
    from torch import Tensor

KEYS = "lora."
"""What the keys of adapters begin with in a checkpoint of rlflow."""


def description(source: TensorSource) -> dict[str, Any] | None:
    """rank, alpha, the trainer's dtype, and as `base` the content hash of the weights that the
    adapters belong to; None for a checkpoint of whole weights."""
    found = source.manifest.get("lora")
    if found is None:
        return None
    try:
        return {
            "rank": int(found["rank"]),
            "alpha": float(found["alpha"]),
            "base": str(found["base"]),
            "dtype": NAMED[source.manifest["dtype"]].name,
        }
    except (KeyError, TypeError, ValueError):
        raise damaged(
            f"{source.path}: damaged; its manifest does not describe its adapters."
        ) from None


def merge(
    source: TensorSource,
    lora: dict[str, Any],
    out: Path,
    reference: Path,
    origin: dict[str, Any],
    options: Options,
) -> dict[str, Any]:
    """Writes the HuggingFace directory of the adapters and their base, the directory `reference`;
    returns its manifest. lora: their `description`.

    Raises ConversionError: adapters of other weights (7), damage (4)."""
    import torch

    from rlflow.models.adapter import Adapter, merged_model
    from rlflow.models.huggingface import digest, iterate_weights
    from rlflow.models.weight_files import write_model

    if digest(iterate_weights(reference)) != lora["base"]:
        raise other_model(
            f"{source.path}: holds LoRA adapters of other weights than those of {reference}; give "
            "the model directory that the training began from."
        )
    scale, dtype = lora["alpha"] / lora["rank"], getattr(torch, lora["dtype"])
    try:
        adapter = Adapter.of(_factors(source), scale, str(source.path))
        weights = merged_model(adapter, reference, dtype)
        return write_model(
            out,
            weights,
            reference,
            shard_bytes=options.shard_bytes,
            overwrite=options.overwrite,
            source=origin,
        )
    except ModelError as error:
        raise other_model(str(error)) from None


def _factors(source: TensorSource) -> list[tuple[str, Tensor]]:
    """The adapters by name. Raises ConversionError (4) where they are not what the checkpoint's
    checksums say."""
    held = {name: source.tensors[name] for name in source.tensors if name.startswith(KEYS)}
    check_records(source, held.values())
    with Reader(source) as reader:
        return [
            (name.removeprefix(KEYS), reader.tensor(View(stored), stored.dtype))
            for name, stored in held.items()
        ]
