"""Options of a conversion, in either direction."""

from __future__ import annotations

from dataclasses import dataclass, field

from .mapping.layout import CheckpointLayout


@dataclass(frozen=True)
class Options:
    """dtype: a word of dtypes.OPTIONS. shard_bytes: tensor bytes per file. workers: files at a
    time. verify: `fast`, `full`, `logits` or `none`.

    expected: sizes that a checkpoint must have: fields of Architecture, `tensor_parallel`, ...,
    `iteration`. layout: of a checkpoint that is written."""

    dtype: str = "keep"
    shard_bytes: int = 4 * 10**9
    workers: int = 4
    overwrite: bool = False
    verify: str = "fast"
    expected: dict[str, int] = field(default_factory=dict)
    layout: CheckpointLayout = field(default_factory=CheckpointLayout)
