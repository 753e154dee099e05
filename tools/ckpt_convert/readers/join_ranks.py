"""Puts the tensors of tensor-parallel ranks together: each becomes chunks of a whole tensor, nothing is read.

How a tensor is cut follows from its name alone, by the tables of all families."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from rlflow.errors import ConversionError, ExitCode
from rlflow.models.rules import Split
from rlflow.models.tables import FAMILIES
from rlflow.storage.pickles import Chunk

from .source import StoredTensor
from .torch_archive import Window

NUMBER = re.compile(r"(?<=layers\.)\d+(?=\.)|(?<=local_experts\.)\d+(?=\.)")


@dataclass(frozen=True)
class RankTensor:
    """What one rank has of a tensor: its global name, the file and where in it, and the tensor-parallel rank."""

    name: str
    file: str
    rank: int
    window: Window


def join_ranks(
    path: Path, parts: Sequence[RankTensor], expert_ranks: int
) -> tuple[dict[str, StoredTensor], tuple[tuple[StoredTensor, StoredTensor], ...]]:
    """(whole tensors by name, pairs that must hold the same bytes because several ranks have all of a tensor).

    expert_ranks: over how many tensor-parallel ranks an expert is cut.
    Raises ConversionError (5) where ranks disagree in shape or dtype, or one of them lacks a tensor."""
    by_name: dict[str, list[RankTensor]] = {}
    for part in parts:
        by_name.setdefault(part.name, []).append(part)
    fused = any(".layer_norm_weight" in name for name in by_name)
    tensors: dict[str, StoredTensor] = {}
    copies: list[tuple[StoredTensor, StoredTensor]] = []
    ranks = 1 + max((part.rank for part in parts), default=0)
    for name, found in by_name.items():
        split = _split(name, fused)
        first = found[0]
        if any((part.window.shape, part.window.dtype) != (first.window.shape, first.window.dtype) for part in found):
            raise ConversionError(
                f"{path}: ranks disagree in '{name}', which is {first.window.shape} {first.window.dtype} in {first.file}; "
                "the files are of two checkpoints.",
                ExitCode.OTHER_LAYOUT,
            )
        if split is Split.REPLICATED:
            tensors[name] = _whole(name, first)
            copies += [(tensors[name], _whole(f"{name} of {part.file}", part)) for part in found[1:]]
            continue
        one_each = sorted({part.rank: part for part in reversed(found)}.values(), key=lambda part: part.rank)
        if "local_experts" in name and expert_ranks == 1:
            one_each = one_each[:1]
        elif len(one_each) != (expert_ranks if "local_experts" in name else ranks):
            raise ConversionError(
                f"{path}: '{name}' is in the files of {len(one_each)} of {ranks} tensor-parallel ranks; copy the whole "
                "checkpoint.",
                ExitCode.OTHER_LAYOUT,
            )
        tensors[name] = _concatenated(name, one_each, split)
    return tensors, tuple(copies)


def _whole(name: str, part: RankTensor) -> StoredTensor:
    shape = part.window.shape
    chunk = Chunk((0,) * len(shape), shape, part.file, part.window.start, part.window.nbytes)
    return StoredTensor(name, shape, part.window.dtype, (chunk,))


def _concatenated(name: str, parts: Sequence[RankTensor], split: Split) -> StoredTensor:
    """Along dimension 1 for ROW, else along dimension 0; a rank's gate rows come before all ranks' up rows."""
    shape, dtype = parts[0].window.shape, parts[0].window.dtype
    axis = 1 if split is Split.ROW else 0
    halves = 2 if split is Split.GATE_UP else 1
    sizes = (*shape[:axis], shape[axis] // halves, *shape[axis + 1 :])
    chunks = []
    for half in range(halves):
        for number, part in enumerate(parts):
            at = (half * len(parts) + number) * sizes[axis]
            offsets = tuple(at if dimension == axis else 0 for dimension in range(len(shape)))
            length = part.window.nbytes // halves
            chunks.append(Chunk(offsets, sizes, part.file, part.window.start + half * length, length))
    whole = (*shape[:axis], shape[axis] * len(parts), *shape[axis + 1 :])
    return StoredTensor(name, whole, dtype, tuple(chunks))


def _split(name: str, fused: bool) -> Split:
    """How a tensor of this name is cut; REPLICATED for names that no table has, which the plan then refuses."""
    split = _splits().get(NUMBER.sub("#", name), Split.REPLICATED)
    if split is Split.LATENT:  # parallel_mode "duplicated" (megatron-core, transformer/multi_latent_attention.py)
        return Split.REPLICATED if fused else Split.COLUMN
    return split


@lru_cache(maxsize=1)
def _splits() -> dict[str, Split]:
    """{name with numbers as #: split} of all families' rules, under both kinds of layers' names."""
    found: dict[str, Split] = {}
    for rules in FAMILIES.values():
        for rule in rules:
            for name in (rule.megatron, rule.fused):
                found[name.replace("{i}", "#").replace("{e}", "#")] = rule.split
    return found
