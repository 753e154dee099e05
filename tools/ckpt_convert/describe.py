"""What a Megatron checkpoint holds, from its tables alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from .mapping.to_huggingface import NOT_WEIGHTS
from .readers.formats import open_source
from .readers.source import StoredTensor


def describe(path: str | Path, everything: bool = False) -> dict[str, Any]:
    """Format, iteration, layout as far as the files tell, and the tensors with shape, dtype, bytes and chunks.

    everything: list optimizer state and snapshots too. Raises ConversionError for a checkpoint that is incomplete,
    damaged, unsupported or hostile."""
    checkpoint = open_source(path)
    weights = {name: stored for name, stored in checkpoint.tensors.items() if not name.startswith(NOT_WEIGHTS)}
    others = [stored for name, stored in checkpoint.tensors.items() if name not in weights]
    listed = checkpoint.tensors if everything else weights
    return {
        "checkpoint": str(checkpoint.path),
        "format": checkpoint.format,
        "keys": "stacked over layers" if any(".layers.self_attention" in name for name in weights) else "per layer",
        "files": len({chunk.file for stored in checkpoint.tensors.values() for chunk in stored.chunks}),
        "iteration": checkpoint.iteration,
        "layout": checkpoint.layout,
        "parameters": sum(math.prod(stored.shape) for stored in weights.values()),
        "weight_bytes": sum(map(_bytes, weights.values())),
        "other_tensors": len(others),
        "other_bytes": sum(map(_bytes, others)),
        "tensors": [
            {
                "name": name,
                "dtype": stored.dtype.name,
                "shape": list(stored.shape),
                "bytes": _bytes(stored),
                "chunks": len(stored.chunks),
            }
            for name, stored in sorted(listed.items())
        ],
    }


def _bytes(stored: StoredTensor) -> int:
    return math.prod(stored.shape) * stored.dtype.itemsize
