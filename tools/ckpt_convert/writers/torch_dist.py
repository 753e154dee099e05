"""The files of a torch_dist checkpoint: what readers/torch_dist.py reads, laid out in the other direction.

`__<number>_0.distcp` hold one archive per chunk and per extra state, `.metadata` says where they are, `metadata.json` names
the format, `common.pt` has Megatron's arguments. megatron-core loads them in any layout."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.models.architecture import Architecture
from rlflow.models.rules import Rule, Split

from ..mapping.plan import Target, Tile
from ..mapping.rank_slices import RankSlice
from ..mapping.to_megatron import Import
from .output_files import Literals, OutputFile
from .torch_archive import ArchiveLayout, TensorStandIn, archive_bytes, lay_out_archive
from .torch_pickle import SIZE, Function, FunctionCall, dumps, object_of, size

FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_METADATA = "torch.distributed.checkpoint.metadata"
_Metadata = object_of(_METADATA, "Metadata")
_TensorMetadata = object_of(_METADATA, "TensorStorageMetadata")
_BytesMetadata = object_of(_METADATA, "BytesStorageMetadata")
_ChunkMetadata = object_of(_METADATA, "ChunkStorageMetadata")
_Properties = object_of(_METADATA, "TensorProperties")
_Index = object_of(_METADATA, "MetadataIndex")
_Place = object_of("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_MEMORY_FORMAT = Function(_METADATA, "_MEM_FORMAT_ENCODING")
_LAYOUT = Function("torch.serialization", "_get_layout")
_NAMES = (
    *(_Metadata, _TensorMetadata, _BytesMetadata, _ChunkMetadata, _Properties, _Index, _Place),
    *(_MEMORY_FORMAT, _LAYOUT, SIZE),
)


@dataclass(frozen=True)
class OutputChunk:
    """A box of a whole tensor: its key there, first element per axis, and what it is made of."""

    key: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    target: Target


def torch_dist_files(work: Import, folder: str, common: dict[str, Any], chunk_bytes: int) -> list[OutputFile]:
    """All files of the checkpoint below `folder`; data files with at most `chunk_bytes` of tensors, or one tensor."""
    chunks = [chunk for rule, layer in work.rules() for chunk in _chunks(work, rule, layer)]
    groups: list[list[OutputChunk]] = [[]]
    filled = 0
    for chunk in chunks:
        if groups[-1] and filled + chunk.target.nbytes > chunk_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(chunk)
        filled += chunk.target.nbytes
    states = _extra_states(work)
    tables = _Tables()
    files = []
    for number, group in enumerate(groups):
        files.append(_data_file(folder, f"__{number}_0.distcp", group, states if number == 0 else [], tables))
    common = {**common, "content_metadata": {"non_homogeneous_layers": has_numbered_layers(work.model)}}
    return [
        *files,
        _literal(f"{folder}/.metadata", tables.pickled()),
        _literal(f"{folder}/metadata.json", json.dumps(FORMAT).encode()),
        _literal(f"{folder}/common.pt", archive_bytes(common)),
    ]


def has_numbered_layers(model: Architecture) -> bool:
    """Whether layers have keys of their own: Megatron stacks them only where all are of one kind (megatron-core,
    transformer/transformer_block.py, TransformerBlock.sharded_state_dict)."""
    return model.experts is not None and len(set(model.experts.sparse)) > 1


def _chunks(work: Import, rule: Rule, layer: int) -> Iterator[OutputChunk]:
    """The parts of the tensor-parallel ranks; gate rows and up rows of a rank are two chunks."""
    key, lead, heights = _key(work, rule, layer)
    dtype = work.dtype_of(rule, layer)
    ranks = 1 if rule.split in (Split.REPLICATED, Split.LATENT) else work.layout.tensor
    axis = 1 if rule.split is Split.ROW else 0
    for rank in range(ranks):
        boxes = _boxes(rule, work.rank_slice(rule, layer, rank))
        for number, (sizes, tiles) in enumerate(boxes):
            inner = [0] * len(sizes)
            # Of GATE_UP all ranks' gate rows come first, then all up rows, so that the tensor loads at any number of ranks
            # (megatron-core, transformer/mlp.py, apply_swiglu_sharded_factory).
            inner[axis] = (number * ranks + rank) * sizes[axis]
            whole = (*sizes[:axis], sizes[axis] * ranks * len(boxes), *sizes[axis + 1 :])
            offsets = (*lead, *inner)
            shape = (*(1 for _ in lead), *sizes)
            columns = sizes[1] if len(sizes) > 1 else 1
            target = Target(f"{key}@{','.join(map(str, offsets))}", shape, dtype, columns, tiles)
            yield OutputChunk(key, (*heights, *whole), offsets, target)


def _boxes(rule: Rule, part: RankSlice) -> list[tuple[tuple[int, ...], tuple[Tile, ...]]]:
    """(sizes, tiles) of the chunks that a rank's part of a tensor is kept as."""
    if rule.split is not Split.GATE_UP:
        return [(part.shape, part.tiles)]
    return [((tile.rows, *part.shape[1:]), (dataclasses.replace(tile, row=0),)) for tile in part.tiles]


def _key(work: Import, rule: Rule, layer: int) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """(key, indices in the stacks, heights of the stacks) of a tensor."""
    name = _stored_name(work, rule)
    lead: tuple[int, ...] = ()
    heights: tuple[int, ...] = ()
    if rule.per_layer and not has_numbered_layers(work.model):
        name, lead, heights = name.replace("{i}.", ""), (layer,), (work.model.layers,)
    if rule.expert is not None and work.model.experts is not None:
        name = name.replace("experts.local_experts.{e}.", "experts.experts.")
        lead, heights = (*lead, rule.expert), (*heights, work.model.experts.count)
    return name.format(i=layer), lead, heights


def _stored_name(work: Import, rule: Rule) -> str:
    """Local layers store norms under Transformer Engine's names too, those of latent attention excepted."""
    if rule.expert is not None:
        return rule.megatron
    if work.layout.fused:
        return rule.fused or rule.megatron
    return rule.megatron if work.model.latent is not None else rule.local_key or rule.fused or rule.megatron


def _extra_states(work: Import) -> list[str]:
    """Keys of the (empty) states that Megatron's modules keep beside weights, and without which it does not load: of
    linear layers, and with Transformer Engine of norms and of the attention itself. Those it has no module for are ignored."""
    found: dict[str, None] = {}
    for rule, layer in work.rules():
        key, lead, heights = _key(work, rule, layer)
        modules = [key.rpartition(".")[0]]
        if key.endswith("linear_proj.weight"):
            modules.append(modules[0].replace("linear_proj", "core_attention"))
        # As ShardedObject.unique_key spells it; without stacks it is object 0 of 1 (megatron-core,
        # dist_checkpointing/mapping.py and transformer/utils.py, make_sharded_object_for_checkpoint).
        shard = f"shard_{'.'.join(map(str, lead)) or 0}_{'.'.join(map(str, heights)) or 1}"
        if rule.per_layer or "layernorm" in key:
            found.update({f"{module}._extra_state/{shard}": None for module in modules})
    return list(found)


def _data_file(
    folder: str, name: str, chunks: Sequence[OutputChunk], states: Sequence[str], tables: _Tables
) -> OutputFile:
    archives: list[tuple[int, ArchiveLayout]] = []
    places: list[tuple[Target, int]] = []
    literals: list[tuple[int, bytes]] = []
    at = 0
    for chunk in chunks:
        target = chunk.target
        archive = lay_out_archive(TensorStandIn(target.name, target.shape, target.dtype))
        archives.append((at, archive))
        places.append((target, at + archive.places()[target.name]))
        tables.add(chunk, name, at, archive.size)
        at += archive.size
    nothing = archive_bytes([None])
    for state in states:
        literals.append((at, nothing))
        tables.add_object(state, name, at, len(nothing))
        at += len(nothing)

    def seal(checksums: Mapping[str, int]) -> Literals:
        return [(start + first, data) for start, archive in archives for first, data in archive.literals(checksums)]

    return OutputFile(f"{folder}/{name}", at, tuple(places), tuple(literals), seal)


def _literal(name: str, content: bytes) -> OutputFile:
    return OutputFile(name, len(content), (), ((0, content),))


class _Tables:
    """The content of `.metadata`."""

    def __init__(self) -> None:
        self._tensors: dict[str, Any] = {}
        self._chunks: dict[str, list[Any]] = {}
        self._places: dict[Any, Any] = {}

    def add(self, chunk: OutputChunk, file: str, start: int, length: int) -> None:
        chunks = self._chunks.setdefault(chunk.key, [])
        if not chunks:
            # dtype, layout, requires_grad, memory format, pin_memory (metadata.py, TensorProperties.__getstate__)
            layout, memory_format = FunctionCall(_LAYOUT, "torch.strided"), FunctionCall(_MEMORY_FORMAT, 0)
            properties = _Properties((chunk.target.dtype, layout, False, memory_format, False))
            self._tensors[chunk.key] = _TensorMetadata(properties=properties, size=size(chunk.whole), chunks=chunks)
        index = _Index(fqn=chunk.key, offset=size(chunk.offsets), index=len(chunks))
        self._places[index] = _Place(relative_path=file, offset=start, length=length)
        chunks.append(_ChunkMetadata(offsets=size(chunk.offsets), sizes=size(chunk.target.shape)))

    def add_object(self, key: str, file: str, start: int, length: int) -> None:
        self._tensors[key] = _BytesMetadata()
        index = _Index(fqn=key, offset=None, index=None)
        self._places[index] = _Place(relative_path=file, offset=start, length=length)

    def pickled(self) -> bytes:
        absent = dict.fromkeys(("planner_data", "storage_meta", "version"))
        content = _Metadata(state_dict_metadata=self._tensors, storage_data=self._places, **absent)
        return dumps(content, *_NAMES)
