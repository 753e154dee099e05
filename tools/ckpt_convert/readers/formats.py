"""Opens a checkpoint, whatever its format."""

from __future__ import annotations

from pathlib import Path

from .legacy import LegacyRanks
from .source import TensorSource, unreadable
from .torch_dist import TorchDist, locate


def open_source(path: str | Path) -> TensorSource:
    """The checked tables of a Megatron checkpoint: torch_dist, or legacy files per rank. Raises ConversionError."""
    try:
        place = locate(Path(path))
        return TorchDist(place) if (place / ".metadata").is_file() else LegacyRanks(place)
    except OSError as error:
        raise unreadable(error, path) from None
