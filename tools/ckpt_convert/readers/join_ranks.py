"""Puts the tensors of tensor-parallel ranks together: each becomes chunks of a whole tensor.

How a tensor is cut follows from its name alone, by the rules of all families."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from rlflow.models.families import FAMILIES
from rlflow.models.rules import Split
from rlflow.storage.pickles import Chunk

from ..mapping.pieces import boxes_of
from ..problems import other_layout
from .source import Record, StoredTensor
from .torch_archive import Window

NUMBER = re.compile(r"(?<=layers\.)\d+(?=\.)|(?<=local_experts\.)\d+(?=\.)")


@dataclass(frozen=True)
class Joined:
    """Whole tensors by name; pairs that must hold the same bytes, because several ranks have all of
    a tensor; and the storage that each chunk lies in."""

    tensors: dict[str, StoredTensor]
    copies: list[tuple[StoredTensor, StoredTensor]]
    records: dict[Chunk, Record]


def join_ranks(path: Path, parts: Iterable[tuple[str, int, Window]], expert_ranks: int) -> Joined:
    """parts: (global name, tensor-parallel rank, what it has). expert_ranks: over how many
    tensor-parallel ranks an expert is cut.

    Raises ConversionError (5) where ranks disagree in shape or dtype, or one lacks a tensor."""
    by_name: dict[str, list[tuple[int, Window]]] = {}
    ranks = 1
    for name, rank, window in parts:
        by_name.setdefault(name, []).append((rank, window))
        ranks = max(ranks, 1 + rank)
    fused = any(".layer_norm_weight" in name for name in by_name)
    joined = Joined({}, [], {})
    for name, found in by_name.items():
        windows = [window for _, window in found]
        _check_alike(path, name, windows)
        split = _split(name, fused)
        if len(windows[0].shape) <= (split is Split.ROW):
            split = Split.REPLICATED  # of a shape that the plan then refuses
        if split is Split.REPLICATED:
            whole = _stored(joined, name, windows[:1], split)
            for window in windows[1:]:
                copy = f"{name} of {window.record.file}"
                joined.copies.append((whole, _stored(joined, copy, [window], split)))
        else:
            wanted = expert_ranks if "local_experts" in name else ranks
            one_each = dict(reversed(found))
            held = [one_each[rank] for rank in sorted(one_each)]
            held = held[:1] if wanted == 1 else held
            if len(held) != wanted:
                raise other_layout(
                    f"{path}: '{name}' is in the files of {len(held)} of {ranks} tensor-parallel "
                    "ranks; copy the whole checkpoint."
                )
            whole = _stored(joined, name, held, split)
        joined.tensors[name] = whole
    return joined


def _check_alike(path: Path, name: str, windows: Sequence[Window]) -> None:
    first = windows[0]
    for window in windows:
        if (window.shape, window.dtype) != (first.shape, first.dtype):
            raise other_layout(
                f"{path}: ranks disagree in '{name}', which is {first.shape} {first.dtype} in "
                f"{first.record.file}; the files are of two checkpoints."
            )


def _stored(joined: Joined, name: str, parts: Sequence[Window], split: Split) -> StoredTensor:
    """A tensor of which each rank, in order, has a part."""
    shape, dtype = list(parts[0].shape), parts[0].dtype
    if split is not Split.REPLICATED:
        shape[1 if split is Split.ROW else 0] *= len(parts)
    chunks = []
    for rank, part in enumerate(parts):
        start = part.start
        for offsets, sizes in boxes_of(split, shape, rank, len(parts)):
            length = math.prod(sizes) * dtype.itemsize
            chunk = Chunk(offsets, sizes, part.record.file, start, length)
            joined.records[chunk] = part.record
            chunks.append(chunk)
            start += length
    return StoredTensor(name, tuple(shape), dtype, tuple(chunks))


def _split(name: str, fused: bool) -> Split:
    """How a tensor of this name is cut; REPLICATED for names that no table has, which the plan then
    refuses."""
    split = _splits().get(NUMBER.sub("#", name), Split.REPLICATED)
    if split is Split.LATENT:
        # parallel_mode "duplicated" (megatron-core, transformer/multi_latent_attention.py)
        return Split.REPLICATED if fused else Split.COLUMN
    return split


@lru_cache(maxsize=1)
def _splits() -> dict[str, Split]:
    """{name with numbers as #: split} of all families' rules, under both kinds of layers' names."""
    return {
        name.replace("{i}", "#").replace("{e}", "#"): rule.split
        for family in FAMILIES.values()
        for rule in family.rules
        for name in (rule.megatron, rule.fused)
    }
