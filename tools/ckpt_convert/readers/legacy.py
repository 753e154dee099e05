"""Megatron's legacy checkpoints, read without Megatron: one file per rank, joined into whole
tensors.

On disk: `mp_rank_<tensor>[_<pipeline>][_<expert>]/model_optim_rng.pt`, each a torch.save of a dict
with `args`, `iteration`, and `model`, or `model0`, `model1`, ... with a virtual pipeline. Layers
count from 0 in every one of these (Megatron-LM, megatron/training/checkpointing.py,
get_checkpoint_name)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlflow.storage.pickles import Chunk, origin_of

from ..problems import damaged, missing, other_layout, unsupported
from .arguments import described_layout, described_model, told
from .join_ranks import join_ranks
from .ranks import KINDS, RankFile, check_ranks
from .source import ChunkPlace, Stamps, StoredTensor, TensorSource
from .torch_archive import Archive, Window, explained

FILES = ("model_optim_rng.pt", "model_rng.pt")
DIRECTORY = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
LAYER = re.compile(r"(?<=decoder\.layers\.)\d+(?=\.)")
LOCAL_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)")
FUSED_EXPERT = re.compile(r"\.mlp\.experts\.(linear_fc[12])\.weight(\d+)$")
NOT_WEIGHTS = ("_extra_state", "inv_freq")
"""Endings of what a module's state holds beside weights: states of fp8 recipes, tables of rotary
embeddings."""


def read_legacy(path: Path) -> TensorSource:
    """The checked tables of a directory: all ranks there, of one iteration, agreeing in shapes.

    Layers and experts are numbered globally; the names are those of Megatron's own (`local`) layers
    where the two kinds differ in how experts are numbered, else as the files have them. Raises
    ConversionError for a rank that is missing (3), damaged (4), of another layout or iteration (5),
    in an unsupported (10) or hostile (11) form."""
    stamps, ranks = Stamps(path), rank_files(path)
    args, layout = ranks[0].args, _layout(ranks)
    experts = args.get("expert_tensor_parallel_size") or layout["tensor_parallel"]
    joined = join_ranks(path, _parts(path, ranks), experts)

    def place_of(stored: StoredTensor, chunk: Chunk) -> ChunkPlace:
        return ChunkPlace(chunk.start, joined.records[chunk])

    return TensorSource(
        path=path,
        format="torch",
        tensors=joined.tensors,
        place_of=place_of,
        stamps=stamps,
        tables=tuple(rank.name for rank in ranks),
        headers=hashlib.sha256(b"".join(rank.digest for rank in ranks)).hexdigest(),
        copies=tuple(joined.copies),
        iteration=ranks[0].iteration,
        layout=layout,
        arguments=args,
        described=described_model(args),
        passed_over=tuple(sorted(set().union(*(rank.passed_over for rank in ranks)))),
    )


def rank_files(path: Path) -> list[RankFile]:
    """The files of all ranks, checked against each other. Raises ConversionError."""
    directories = [directory for directory in path.glob("mp_rank_*") if directory.is_dir()]
    ranks = [_read(path, directory) for directory in sorted(directories)]
    ranks.sort(key=lambda rank: (rank.pipeline, rank.expert, rank.tensor))
    check_ranks(path, ranks)
    return ranks


def _layout(ranks: Sequence[RankFile]) -> dict[str, int]:
    """Ranks by kind, from the files that there are."""
    found = {f"{kind}_parallel": 1 + max(getattr(rank, kind) for rank in ranks) for kind in KINDS}
    if len(ranks[0].chunks) > 1:
        found["virtual_pipeline_parallel"] = len(ranks[0].chunks)
    claimed = described_layout(ranks[0].args)
    claimed.pop("virtual_pipeline_parallel", None)
    return {**claimed, **found}


def _read(path: Path, directory: Path) -> RankFile:
    match = DIRECTORY.fullmatch(directory.name)
    if not match:
        raise unsupported(
            f"{directory}: not a rank of a checkpoint; expected "
            "mp_rank_<tensor>[_<pipeline>][_<expert>]."
        )
    file = next((directory / name for name in FILES if (directory / name).is_file()), None)
    if file is None:
        raise missing(f"{directory / FILES[0]}: missing; copy the whole checkpoint.")
    name = file.relative_to(path).as_posix()
    with file.open("rb") as stream:
        if stream.read(4) != b"PK\x03\x04":
            raise damaged(
                f"{file}: damaged, or saved by torch before 1.6; expected an archive of torch.save."
            )
        with explained(file):
            archive = Archive(stream, name)
            state = archive.value if isinstance(archive.value, dict) else {}
            chunks = tuple(_windows(file, archive, chunk) for chunk in _models(file, state))
    args, iteration = told(state)
    tensor, second, third = (int(number or 0) for number in match.groups())
    # Two numbers are tensor and pipeline, or tensor and expert where there is no pipeline.
    if match[3] is None and args.get("pipeline_model_parallel_size") == 1:
        second, third = 0, second
    return RankFile(
        name=name,
        tensor=tensor,
        pipeline=second,
        expert=third,
        chunks=chunks,
        args=args,
        iteration=iteration,
        digest=hashlib.sha256(archive.pickle).digest(),
        passed_over=frozenset(archive.passed_over),
    )


def _models(file: Path, state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The states of the model chunks, in order."""
    found = [state["model"]] if "model" in state else []
    while f"model{len(found)}" in state:
        found.append(state[f"model{len(found)}"])
    if not found or not all(isinstance(chunk, dict) for chunk in found):
        raise unsupported(
            f"{file}: holds no weights ('model' or 'model0' expected, found: "
            f"{', '.join(sorted(map(str, state)))[:200]})."
        )
    names = [str(name) for chunk in found for name in chunk]
    grouped = next((name for name in names if name.endswith("mlp.experts.weight1")), None)
    if grouped is not None:
        raise unsupported(
            f"{file}: '{grouped}' holds all experts transposed (moe_use_legacy_grouped_gemm), "
            "which is not read; save the checkpoint as torch_dist, where Megatron itself takes "
            "them apart."
        )
    if "language_model" in names:
        raise unsupported(
            f"{file}: is of a model from before megatron-core ('language_model'); save it with "
            "--use-mcore-models."
        )
    return found


def _windows(file: Path, archive: Archive, state: Mapping[str, Any]) -> dict[str, Window]:
    """The tensors of a model chunk. Raises ConversionError (10) where an object of another kind is
    in the place of one."""
    windows = {}
    for name, value in state.items():
        if not isinstance(name, str) or name.endswith(NOT_WEIGHTS):
            continue
        window = archive.window(value)
        if window is not None:
            windows[name.removeprefix("module.")] = window
        elif origin_of(value):
            raise unsupported(
                f"{file}: '{name[:200]}' is an object of {origin_of(value)[:200]}, which is not "
                "loaded; save the checkpoint with plain tensors in the place of weights."
            )
    return windows


def _parts(path: Path, ranks: Sequence[RankFile]) -> Iterator[tuple[str, int, Window]]:
    """(name, tensor rank, what it has) of every rank, layer and expert numbered globally."""
    first_layers = _first_layers(path, ranks)
    for rank in ranks:
        for number, windows in enumerate(rank.chunks):
            named = {
                FUSED_EXPERT.sub(r".mlp.experts.local_experts.\2.\1.weight", name): window
                for name, window in windows.items()
            }
            first_expert = rank.expert * _count(LOCAL_EXPERT, named)
            for name, window in named.items():
                name = _shifted(LAYER, name, first_layers[number, rank.pipeline])
                name = _shifted(LOCAL_EXPERT, name, first_expert)
                yield name, rank.tensor, window


def _first_layers(path: Path, ranks: Sequence[RankFile]) -> dict[tuple[int, int], int]:
    """The global number of the first layer of each (model chunk, pipeline rank): chunks come first,
    then ranks."""
    first, at = {}, 0
    for chunk in range(len(ranks[0].chunks)):
        for stage in sorted({rank.pipeline for rank in ranks}):
            held = [rank.chunks[chunk] for rank in ranks if rank.pipeline == stage]
            heights = {_count(LAYER, names) for names in held}
            if len(heights) > 1:
                raise other_layout(
                    f"{path}: the ranks of pipeline rank {stage} have {sorted(heights)} layers; "
                    "they are of two checkpoints."
                )
            first[chunk, stage] = at
            at += heights.pop()
    return first


def _count(pattern: re.Pattern[str], names: Iterable[str]) -> int:
    """One more than the largest number of a kind in the names."""
    return 1 + max((int(match[0]) for match in map(pattern.search, names) if match), default=-1)


def _shifted(pattern: re.Pattern[str], name: str, first: int) -> str:
    return pattern.sub(lambda match: str(first + int(match[0])), name)
