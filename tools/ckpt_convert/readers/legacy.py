"""Megatron's legacy checkpoints, read without Megatron: one file per rank, presented as whole tensors.

On disk: `mp_rank_<tensor>[_<pipeline>][_<expert>]/model_optim_rng.pt`, each a torch.save of a dict with `args`,
`iteration`, and `model`, or `model0`, `model1`, ... with a virtual pipeline. Layers count from 0 in every one of these
(Megatron-LM, megatron/training/checkpointing.py, get_checkpoint_name)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rlflow.errors import ConversionError, ExitCode
from rlflow.storage.pickles import Chunk, Inert

from .arguments import described_layout, described_model
from .join_ranks import RankTensor, join_ranks
from .source import Content, Record, Stamps, StoredTensor
from .torch_archive import Archive, Window, explained

if TYPE_CHECKING:
    from torch import Tensor

FILES = ("model_optim_rng.pt", "model_rng.pt")
DIRECTORY = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
LAYER = re.compile(r"(?<=decoder\.layers\.)\d+(?=\.)")
LOCAL_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)")
FUSED_EXPERT = re.compile(r"\.mlp\.experts\.(linear_fc[12])\.weight(\d+)$")
NOT_WEIGHTS = ("_extra_state", "inv_freq")
"""Endings of what a module's state holds beside weights: states of fp8 recipes, tables of rotary embeddings."""


@dataclass(frozen=True)
class RankFile:
    """One rank's file: its place, its tensors by name within each model chunk, and what it says of itself."""

    name: str
    tensor: int
    pipeline: int
    expert: int
    chunks: tuple[Mapping[str, Window], ...]
    args: Mapping[str, Any]
    iteration: int | None
    digest: bytes


class LegacyRanks:
    """A checkpoint's ranks, checked: all there, of one iteration, agreeing in their shapes, joined into global tensors.

    Layers and experts are numbered globally; the names are those of Megatron's own (`local`) layers where the two kinds
    differ in how experts are numbered, else as the file has them. Raises ConversionError for a rank that is missing (3),
    damaged (4), of another layout or iteration (5), in an unsupported (10) or hostile (11) form."""

    format = "torch"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stamps = Stamps(path)
        directories = sorted(directory for directory in path.glob("mp_rank_*") if directory.is_dir())
        self._ranks = _complete(path, [_read(path, directory) for directory in directories])
        _check_places(path, self._ranks)
        experts = self._ranks[0].args.get("expert_tensor_parallel_size") or self.layout["tensor_parallel"]
        self.tensors, self.copies = join_ranks(path, list(_parts(path, self._ranks)), experts)

    @property
    def iteration(self) -> int | None:
        """The training step that the checkpoint was saved after, as far as its files tell."""
        return self._ranks[0].iteration

    @property
    def layout(self) -> dict[str, int]:
        """Ranks by kind, from the files that there are."""
        found = {
            "tensor_parallel": 1 + max(rank.tensor for rank in self._ranks),
            "pipeline_parallel": 1 + max(rank.pipeline for rank in self._ranks),
            "expert_parallel": 1 + max(rank.expert for rank in self._ranks),
            "virtual_pipeline_parallel": len(self._ranks[0].chunks),
        }
        claimed = {name: size for name, size in described_layout(self._ranks[0].args).items() if name not in found}
        return {**claimed, **{name: size for name, size in found.items() if size > 1 or "virtual" not in name}}

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Megatron's arguments, as far as the files have them."""
        return self._ranks[0].args

    @property
    def described(self) -> dict[str, Any]:
        """What the files say of the model, by field of Architecture."""
        return described_model(self._ranks[0].args)

    def content(self, stored: StoredTensor, chunk: Chunk) -> Content:
        """See `TensorSource.content`. The files have checksums of storages, not of tensors: `records`."""
        return Content(chunk.start, chunk.length)

    def rank_states(self, tensor: int, pipeline: int, expert: int) -> list[dict[str, Tensor]]:
        """The states of one rank's model chunks, as its file names them: copies of the tensors, and nothing else of it.

        Raises ConversionError (3) where there is no such file."""
        for rank in self._ranks:
            if (rank.tensor, rank.pipeline, rank.expert) == (tensor, pipeline, expert):
                with (self.path / rank.name).open("rb") as stream:
                    return [{name: _tensor(stream, window) for name, window in chunk.items()} for chunk in rank.chunks]
        raise ConversionError(
            f"{self.path}: has no file of tensor rank {tensor}, pipeline rank {pipeline}, expert rank {expert}.",
            ExitCode.MISSING,
        )

    def records(self) -> Iterator[tuple[str, Record]]:
        """(file, storage) of everything that tensors lie in, for checking whole storages."""
        for rank in self._ranks:
            for record in sorted({window.record for chunk in rank.chunks for window in chunk.values()}, key=repr):
                yield rank.name, record

    def identity(self) -> dict[str, Any]:
        """See `TensorSource.identity`."""
        return {
            "files": {rank.name: _size_and_time(self.path / rank.name) for rank in self._ranks},
            "headers": self._headers,
        }

    @cached_property
    def _headers(self) -> str:
        return hashlib.sha256(b"".join(rank.digest for rank in self._ranks)).hexdigest()


def _tensor(stream: IO[bytes], window: Window) -> Tensor:
    import torch

    stream.seek(window.start)
    data = bytearray(stream.read(window.nbytes))
    return torch.frombuffer(data, dtype=getattr(torch, window.dtype.name)).view(window.shape)


def _size_and_time(file: Path) -> list[int]:
    found = file.stat()
    return [found.st_size, found.st_mtime_ns]


def _read(path: Path, directory: Path) -> RankFile:
    match = DIRECTORY.fullmatch(directory.name)
    files = [directory / name for name in FILES if (directory / name).is_file()]
    if not match:
        raise ConversionError(
            f"{directory}: not a rank of a checkpoint; expected mp_rank_<tensor>[_<pipeline>][_<expert>].",
            ExitCode.UNSUPPORTED,
        )
    if not files:
        raise ConversionError(f"{directory / FILES[0]}: missing; copy the whole checkpoint.", ExitCode.MISSING)
    with files[0].open("rb") as stream:
        if stream.read(4) != b"PK\x03\x04":
            raise ConversionError(
                f"{files[0]}: damaged, or saved by torch before 1.6; expected an archive of torch.save.",
                ExitCode.DAMAGED,
            )
        with explained(files[0]):
            archive = Archive(stream)
            state = archive.value if isinstance(archive.value, dict) else {}
            chunks = tuple(_windows(archive, chunk) for chunk in _models(files[0], state))
    args = state.get("args")
    args = args.state if isinstance(args, Inert) and isinstance(args.state, dict) else {}
    tensor, second, third = (None if number is None else int(number) for number in match.groups())
    # Two numbers are tensor and pipeline, or tensor and expert where there is no pipeline.
    without_pipeline = second is not None and third is None and args.get("pipeline_model_parallel_size") == 1
    pipeline, expert = (0, second) if without_pipeline else (second or 0, third or 0)
    iteration = state.get("iteration")
    return RankFile(
        name=files[0].relative_to(path).as_posix(),
        tensor=tensor or 0,
        pipeline=pipeline,
        expert=expert or 0,
        chunks=chunks,
        args=args,
        iteration=iteration if isinstance(iteration, int) else None,
        digest=hashlib.sha256(archive.pickle).digest(),
    )


def _models(file: Path, state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The states of the model chunks, in order."""
    found = [state["model"]] if "model" in state else []
    while f"model{len(found)}" in state:
        found.append(state[f"model{len(found)}"])
    if not found or not all(isinstance(chunk, dict) for chunk in found):
        raise ConversionError(
            f"{file}: holds no weights ('model' or 'model0' expected, found: {', '.join(sorted(map(str, state)))[:200]}).",
            ExitCode.UNSUPPORTED,
        )
    grouped = next((name for chunk in found for name in chunk if str(name).endswith("mlp.experts.weight1")), None)
    if grouped is not None:
        raise ConversionError(
            f"{file}: '{grouped}' holds all experts transposed (moe_use_legacy_grouped_gemm), which is not read; save the "
            "checkpoint as torch_dist, where Megatron itself takes them apart.",
            ExitCode.UNSUPPORTED,
        )
    if any("language_model" in chunk for chunk in found):
        raise ConversionError(
            f"{file}: is of a model from before megatron-core ('language_model'); save it with --use-mcore-models.",
            ExitCode.UNSUPPORTED,
        )
    return found


def _windows(archive: Archive, state: Mapping[str, Any]) -> dict[str, Window]:
    windows = {str(name): archive.window(value) for name, value in state.items() if not str(name).endswith(NOT_WEIGHTS)}
    return {name.removeprefix("module."): window for name, window in windows.items() if window is not None}


def _complete(path: Path, ranks: list[RankFile]) -> list[RankFile]:
    """The ranks in order. Raises ConversionError where one is missing or says that it is of another run."""
    ranks = sorted(ranks, key=lambda rank: (rank.pipeline, rank.expert, rank.tensor))
    sizes = [1 + max(getattr(rank, kind) for rank in ranks) for kind in ("tensor", "pipeline", "expert")]
    for rank in ranks:
        claimed = described_layout(rank.args)
        for name, size in zip(("tensor_parallel", "pipeline_parallel", "expert_parallel"), sizes):
            if size < claimed.get(name, size):
                raise ConversionError(
                    f"{path}: ranks are missing; {rank.name} is of {name.replace('_', ' ')} {claimed[name]}, directories of "
                    f"{size} found.",
                    ExitCode.MISSING,
                )
            if size > claimed.get(name, size):
                raise ConversionError(
                    f"{path}: has directories of {name.replace('_', ' ')} {size}, but {rank.name} is of {claimed[name]}; they "
                    "are of two checkpoints.",
                    ExitCode.OTHER_LAYOUT,
                )
        if (rank.iteration, len(rank.chunks)) != (ranks[0].iteration, len(ranks[0].chunks)):
            raise ConversionError(
                f"{path / rank.name}: is of iteration {rank.iteration} with {len(rank.chunks)} model chunks, {ranks[0].name} "
                f"of {ranks[0].iteration} with {len(ranks[0].chunks)}; the files are of two checkpoints.",
                ExitCode.OTHER_LAYOUT,
            )
    # Where experts are cut otherwise than the rest, not every pair of tensor and expert rank has a file.
    pairs = {(rank.tensor, rank.pipeline) for rank in ranks} | {(-1 - rank.expert, rank.pipeline) for rank in ranks}
    lacking = [
        (number, stage)
        for stage in range(sizes[1])
        for number in (*range(sizes[0]), *(-1 - expert for expert in range(sizes[2])))
        if (number, stage) not in pairs
    ]
    if lacking:
        number, stage = lacking[0]
        kind = f"tensor rank {number}" if number >= 0 else f"expert rank {-1 - number}"
        raise ConversionError(
            f"{path}: the file of {kind}, pipeline rank {stage} is missing; {len(ranks)} mp_rank_* found, tensor x pipeline "
            f"x expert is {' x '.join(map(str, sizes))}. Copy the whole checkpoint.",
            ExitCode.MISSING,
        )
    return ranks


def _check_places(path: Path, ranks: list[RankFile]) -> None:
    """Raises ConversionError (5) where a file lies in another rank's directory: by the global rank that its arguments name,
    or because two tensor ranks have the same weights."""
    numbers = {rank.args.get("rank") for rank in ranks}
    seen: dict[Any, RankFile] = {}
    for rank in ranks:
        own = {"tensor": rank.tensor, "pipeline": rank.pipeline, "expert": rank.expert}
        if len(numbers) > 1:  # tools that save all ranks in one process leave the same number in all
            for kind, number in _place(rank.args).items():
                if own[kind] != number:
                    raise ConversionError(
                        f"{path / rank.name}: was saved by rank {rank.args['rank']}, {kind} rank {number}, and lies in the "
                        f"directory of {kind} rank {own[kind]}; files of ranks were exchanged. Copy the checkpoint again.",
                        ExitCode.OTHER_LAYOUT,
                    )
        checksums = tuple(window.record.crc32 for chunk in rank.chunks for window in chunk.values())
        other = seen.setdefault((rank.pipeline, rank.expert, checksums), rank)
        if other is not rank and any(checksums):  # torch can leave checksums out
            raise ConversionError(
                f"{path / rank.name}: has the weights of {other.name}; one is a copy of the other. Copy the checkpoint again.",
                ExitCode.OTHER_LAYOUT,
            )


def _place(args: Mapping[str, Any]) -> dict[str, int]:
    """{`tensor`, `pipeline`, `expert`: rank} that a global rank has by its arguments, as far as they tell (megatron-core,
    parallel_state.py, initialize_model_parallel: tensor ranks are neighbours, then context, data, pipeline ranks)."""
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
        found["expert"] = number // (args.get("expert_tensor_parallel_size") or tensor) % experts
    return found


def _parts(path: Path, ranks: list[RankFile]) -> Iterator[RankTensor]:
    """Every tensor of every rank, its layer and expert numbered globally."""
    first_layers = _first_layers(path, ranks)
    for rank in ranks:
        for chunk, windows in enumerate(rank.chunks):
            experts = _local_experts(windows)
            for name, window in windows.items():
                layer = LAYER.search(name)
                renamed = name
                if layer:
                    number = first_layers[chunk, rank.pipeline] + int(layer[0])
                    renamed = LAYER.sub(str(number), renamed)
                renamed = FUSED_EXPERT.sub(r".mlp.experts.local_experts.\2.\1.weight", renamed)
                expert = LOCAL_EXPERT.search(renamed)
                if expert:
                    renamed = LOCAL_EXPERT.sub(str(rank.expert * experts + int(expert[0])), renamed)
                yield RankTensor(renamed, rank.name, rank.tensor, window)


def _first_layers(path: Path, ranks: list[RankFile]) -> dict[tuple[int, int], int]:
    """The global number of the first layer of each (model chunk, pipeline rank): chunks come first, then ranks."""
    first, at = {}, 0
    for chunk in range(len(ranks[0].chunks)):
        for stage in sorted({rank.pipeline for rank in ranks}):
            heights = {_layers(rank.chunks[chunk]) for rank in ranks if rank.pipeline == stage}
            if len(heights) > 1:
                raise ConversionError(
                    f"{path}: the ranks of pipeline rank {stage} have {sorted(heights)} layers; they are of two checkpoints.",
                    ExitCode.OTHER_LAYOUT,
                )
            first[chunk, stage] = at
            at += heights.pop()
    return first


def _layers(names: Iterable[str]) -> int:
    return 1 + max((int(match[0]) for match in map(LAYER.search, names) if match), default=-1)


def _local_experts(names: Iterable[str]) -> int:
    """Experts that a rank holds."""
    renamed = (FUSED_EXPERT.sub(r".mlp.experts.local_experts.\2.\1.weight", name) for name in names)
    return 1 + max((int(match[0]) for match in map(LOCAL_EXPERT.search, renamed) if match), default=-1)
