"""Options of a conversion, in either direction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .mapping.layout import CheckpointLayout


@dataclass(frozen=True)
class Options:
    """dtype: a word of dtypes.OPTIONS. shard_bytes: tensor bytes per file. workers: files at a
    time. verify: `fast`, `full` or `none`. check: a further check of the finished directory, before
    it gets its name.

    expected: sizes that a checkpoint must have: fields of Architecture, `tensor_parallel`, ...,
    `iteration`. layout, format: of a checkpoint that is written; `torch`: legacy mp_rank_*."""

    dtype: str = "keep"
    shard_bytes: int = 4 * 10**9
    workers: int = 4
    overwrite: bool = False
    verify: str = "fast"
    check: Callable[[Path], None] | None = None
    expected: dict[str, int] = field(default_factory=dict)
    layout: CheckpointLayout = field(default_factory=CheckpointLayout)
    format: str = "torch_dist"
