"""A Megatron checkpoint's format, layout and tensors, from its tables alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from .mapping.to_huggingface import weights_of
from .readers.formats import open_source
from .readers.source import StoredTensor


def describe(path: str | Path, everything: bool = False) -> dict[str, Any]:
    """Format, iteration, layout as far as the files tell, and the tensors with shape, dtype, bytes
    and chunks.

    everything: list optimizer state and snapshots too. Raises ConversionError for a checkpoint that
    is incomplete, damaged, unsupported or hostile."""
    checkpoint = open_source(path)
    weights = weights_of(checkpoint)
    others = [stored for name, stored in checkpoint.tensors.items() if name not in weights]
    files = {chunk.file for stored in checkpoint.tensors.values() for chunk in stored.chunks}
    stacked = any(".layers.self_attention" in name for name in weights)
    listed = checkpoint.tensors if everything else weights
    return {
        "checkpoint": str(checkpoint.path),
        "format": checkpoint.format,
        "keys": "stacked over layers" if stacked else "per layer",
        "files": len(files),
        "iteration": checkpoint.iteration,
        "layout": checkpoint.layout,
        "parameters": sum(math.prod(stored.shape) for stored in weights.values()),
        "weight_bytes": sum(map(_bytes, weights.values())),
        "other_tensors": len(others),
        "other_bytes": sum(map(_bytes, others)),
        "remark": checkpoint.remark(),
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


def table(report: dict[str, Any]) -> str:
    """A description as lines to read."""
    sizes = (f"{key.replace('_', ' ')} {value}" for key, value in report["layout"].items())
    iteration = report["iteration"]
    others = f"{report['other_tensors']} tensors ({report['other_bytes'] / 1e9:.3f} GB)"
    lines = [
        f"checkpoint  {report['checkpoint']}",
        f"format      {report['format']}, keys {report['keys']}, {report['files']} data files",
        f"iteration   {'not recorded' if iteration is None else iteration}",
        f"layout      {', '.join(sizes) or 'not recorded'}",
        f"weights     {report['parameters']:,} parameters, {report['weight_bytes'] / 1e9:.3f} GB",
        f"besides     {others} of optimizer and snapshots",
    ]
    if report["remark"]:
        lines.append(report["remark"])
    width = max((len(tensor["name"]) for tensor in report["tensors"]), default=0)
    for tensor in report["tensors"]:
        shape = "x".join(map(str, tensor["shape"]))
        lines.append(
            f"  {tensor['name']:<{width}}  {tensor['dtype']:<8}  {shape:<16} "
            f"{tensor['bytes'] / 1e6:10.3f} MB  {tensor['chunks']} chunks"
        )
    return "\n".join(lines)
