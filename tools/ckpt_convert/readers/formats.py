"""Finds a checkpoint's directory and reads its tables, whatever its format."""

from __future__ import annotations

import re
from pathlib import Path

from ..problems import missing, unsupported
from .legacy import read_legacy
from .source import TensorSource, unreadable
from .torch_dist import read_torch_dist

TRACKER = "latest_checkpointed_iteration.txt"
"""In a save directory of Megatron: the iteration to load."""


def open_source(path: str | Path) -> TensorSource:
    """The checked tables of a Megatron checkpoint: torch_dist, or legacy files per rank.

    Raises ConversionError."""
    try:
        place = locate(Path(path))
        torch_dist = (place / ".metadata").is_file()
        return read_torch_dist(place) if torch_dist else read_legacy(place)
    except OSError as error:
        raise unreadable(error, path) from None


def locate(path: Path) -> Path:
    """The directory with the checkpoint's files: `path`, its `trainer`, the iteration that
    Megatron's tracker names, or the only checkpoint that lies in it."""
    if not path.is_dir():
        raise missing(f"{path}: no such checkpoint directory.")
    if (path / TRACKER).is_file() and not (path / ".metadata").exists():
        path = _tracked(path / TRACKER)
    if (path / "trainer").is_dir() and not (path / ".metadata").exists():
        path = path / "trainer"
    if (path / ".metadata").is_file() or any(path.glob("mp_rank_*/")):
        return path
    if any(path.glob("*.distcp")) or (path / "metadata.json").exists():
        raise missing(f"{path}/.metadata: missing; it is written last, so the save was cut short.")
    patterns = ("*/.metadata", "*/mp_rank_*", "*/trainer/.metadata")
    found = [file.relative_to(path) for pattern in patterns for file in path.glob(pattern)]
    inside = sorted({file.parts[0] for file in found})
    if len(inside) == 1:
        return locate(path / inside[0])
    if inside:
        raise missing(f"{path}: holds several checkpoints; name one: {', '.join(inside)}.")
    raise unsupported(
        f"{path}: no checkpoint; expected .metadata and *.distcp files, or mp_rank_* directories."
    )


def _tracked(tracker: Path) -> Path:
    word = tracker.read_text(errors="replace").strip()[:100]
    number = word.isascii() and word.isdigit()
    path = tracker.parent / (f"iter_{int(word):07d}" if number else word)
    if not re.fullmatch(r"\w+", word) or not path.is_dir():
        raise missing(f"{tracker}: names '{word}', but {path.name}/ is not there.")
    return path
