"""Checks that the files of a legacy checkpoint belong together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..problems import missing, other_layout
from .arguments import described_layout
from .torch_archive import Window

KINDS = ("tensor", "pipeline", "expert")


@dataclass(frozen=True)
class RankFile:
    """A rank's file: its place, its tensors by name within each model chunk, what it says of
    itself, and the names of objects in it that were passed over."""

    name: str
    tensor: int
    pipeline: int
    expert: int
    chunks: tuple[Mapping[str, Window], ...]
    args: Mapping[str, Any]
    iteration: int | None
    digest: bytes
    passed_over: frozenset[str] = frozenset()


def check_ranks(path: Path, ranks: Sequence[RankFile]) -> None:
    """Raises ConversionError where a rank is missing (3), or a file is of another run or lies in
    another rank's directory (5)."""
    sizes = {kind: 1 + max(getattr(rank, kind) for rank in ranks) for kind in KINDS}
    first = ranks[0]
    for rank in ranks:
        _check_claims(path, rank, sizes)
        if (rank.iteration, len(rank.chunks)) != (first.iteration, len(first.chunks)):
            raise other_layout(
                f"{path / rank.name}: is of iteration {rank.iteration} with {len(rank.chunks)} "
                f"model chunks, {first.name} of {first.iteration} with {len(first.chunks)}; the "
                "files are of two checkpoints."
            )
    _check_all_there(path, ranks, sizes)
    _check_places(path, ranks)


def _check_claims(path: Path, rank: RankFile, sizes: Mapping[str, int]) -> None:
    claimed = described_layout(rank.args)
    for kind, size in sizes.items():
        wanted = claimed.get(f"{kind}_parallel", size)
        if size < wanted:
            raise missing(
                f"{path}: ranks are missing; {rank.name} is of {kind} parallel {wanted}, "
                f"directories of {size} found."
            )
        if size > wanted:
            raise other_layout(
                f"{path}: has directories of {kind} parallel {size}, but {rank.name} is of "
                f"{wanted}; they are of two checkpoints."
            )


def _check_all_there(path: Path, ranks: Sequence[RankFile], sizes: Mapping[str, int]) -> None:
    """Where experts are cut otherwise than the rest, not every pair of tensor and expert rank has a
    file; each of both kinds has one in each stage."""
    for stage in range(sizes["pipeline"]):
        for kind in ("tensor", "expert"):
            held = {getattr(rank, kind) for rank in ranks if rank.pipeline == stage}
            lacking = sorted(set(range(sizes[kind])) - held)
            if lacking:
                raise missing(
                    f"{path}: the file of {kind} rank {lacking[0]}, pipeline rank {stage} is "
                    f"missing; {len(ranks)} mp_rank_* found, tensor x pipeline x expert is "
                    f"{' x '.join(map(str, sizes.values()))}. Copy the whole checkpoint."
                )


def _check_places(path: Path, ranks: Sequence[RankFile]) -> None:
    """By the global rank that a file's arguments name, and because two tensor ranks cannot have the
    same weights."""
    # Tools that save all ranks in one process leave the same number in all.
    numbered = len({rank.args.get("rank") for rank in ranks}) > 1
    seen: dict[Any, RankFile] = {}
    for rank in ranks:
        for kind, number in _place(rank.args).items() if numbered else ():
            if getattr(rank, kind) != number:
                raise other_layout(
                    f"{path / rank.name}: was saved by rank {rank.args['rank']}, {kind} rank "
                    f"{number}, and lies in the directory of {kind} rank {getattr(rank, kind)}; "
                    "files of ranks were exchanged. Copy the checkpoint again."
                )
        windows = [window for chunk in rank.chunks for window in chunk.values()]
        checksums = tuple(window.record.crc32 for window in windows)
        other = seen.setdefault((rank.pipeline, rank.expert, checksums), rank)
        if other is not rank and any(checksums):  # torch can leave checksums out
            raise other_layout(
                f"{path / rank.name}: has the weights of {other.name}; one is a copy of the other. "
                "Copy the checkpoint again."
            )


def _place(args: Mapping[str, Any]) -> dict[str, int]:
    """{kind: rank} that a global rank has by its arguments, as far as they tell (megatron-core,
    parallel_state.py, initialize_model_parallel: tensor ranks are neighbours, then context, data,
    pipeline ranks)."""
    number, layout, world = args.get("rank"), described_layout(args), args.get("world_size")
    tensor, pipeline = layout.get("tensor_parallel"), layout.get("pipeline_parallel")
    if not isinstance(number, int) or not tensor or not pipeline:
        return {}
    found = {"tensor": number % tensor}
    if args.get("use_tp_pp_dp_mapping"):
        found["pipeline"] = number // (tensor * layout.get("context_parallel", 1)) % pipeline
    elif isinstance(world, int) and world >= pipeline and world % pipeline == 0:
        found["pipeline"] = number // (world // pipeline)
    experts = layout.get("expert_parallel")
    if experts:
        width = args.get("expert_tensor_parallel_size") or tensor
        found["expert"] = number // width % experts
    return found
