"""Finds a checkpoint's directory and reads its tables, whatever its format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from .folders import locate, step_of
from .legacy import read_legacy
from .source import TensorSource, unreadable
from .torch_dist import read_torch_dist


def open_source(path: str | Path) -> TensorSource:
    """The checked tables of a Megatron checkpoint: torch_dist, or legacy files per rank.

    Raises ConversionError."""
    try:
        place = locate(Path(path))
        torch_dist = (place / ".metadata").is_file()
        source = read_torch_dist(place) if torch_dist else read_legacy(place)
    except OSError as error:
        raise unreadable(error, path) from None
    return replace(source, iteration=step_of(place, source.iteration))
