"""A torch_dist checkpoint, in the layout of torch.distributed.checkpoint.

`__<number>_0.distcp` hold one file of torch.save per chunk and per extra state, `.metadata` says
where they are, `metadata.json` names the format, `common.pt` has Megatron's arguments.
megatron-core loads them in any layout.

torch's own FileSystemWriter is not used: it keeps the last tensor of each key until a file ends,
which are all tensors of a model whose layers have keys of their own (torch 2.13,
distributed/checkpoint/filesystem.py, _write_files_from_queue)."""

from __future__ import annotations

import argparse
import io
import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from rlflow.models.architecture import Architecture
from rlflow.models.huggingface import in_groups
from rlflow.models.rules import Rule, Split

from ..dtypes import as_tensor
from ..mapping.find import Place, stacked_place
from ..mapping.plan import Target
from ..mapping.to_megatron import Import
from ..stream import Copier
from .files import HashedFile, OutputFile

CHUNK_BYTES = 8 << 20
"""Of a chunk, or one row: a thread holds it in memory, and torch.save's copy of it."""
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint to be written. files: those with weights. finish: writes the others into a
    directory that has these."""

    files: tuple[OutputFile, ...]
    finish: Callable[[Path], None]


@dataclass(frozen=True)
class OutputChunk:
    """A box of a whole tensor: its key and shape there, the first element per axis, and the size
    per axis."""

    key: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    target: Target


@dataclass
class _DataFile:
    """Chunks, and keys of states, that are in a file, and, once it is written, where: (first byte,
    bytes) of each."""

    name: str
    parts: Sequence[OutputChunk | str]
    places: list[tuple[int, int]] = field(default_factory=list)

    def write(self, file: HashedFile, copier: Copier) -> None:
        nothing = io.BytesIO()
        torch.save([None], nothing)
        for part in self.parts:
            start = file.tell()
            if isinstance(part, str):
                file.write(nothing.getbuffer())
            else:
                data = np.empty(part.target.nbytes, np.uint8)
                copier.fill(part.target, data)
                tensor = as_tensor(data, part.target.dtype, part.sizes)
                torch.save(tensor, file)  # type: ignore[arg-type]
            self.places.append((start, file.tell() - start))


def torch_dist_checkpoint(
    work: Import, folder: str, arguments: dict[str, Any], file_bytes: int
) -> Checkpoint:
    """The checkpoint below `folder`; data files with at most `file_bytes` of tensors."""
    chunks = [part for rule, layer in work.rules() for part in _chunks(work, rule, layer)]
    groups = in_groups(chunks, lambda chunk: chunk.target.nbytes, file_bytes)
    data, files = [], []
    for number, group in enumerate(groups):
        states = _extra_states(work) if number == 0 else []
        data.append(_DataFile(f"__{number}_0.distcp", [*group, *states]))
        targets = tuple(chunk.target for chunk in group)
        files.append(OutputFile(f"{folder}/{data[-1].name}", targets, data[-1].write))
    content = {"non_homogeneous_layers": has_numbered_layers(work.model)}
    common = {**common_state(arguments), "content_metadata": content}

    def finish(directory: Path) -> None:
        place = directory / folder
        (place / "metadata.json").write_text(json.dumps(FORMAT))
        torch.save(common, place / "common.pt")
        (place / ".metadata").write_bytes(pickle.dumps(_tables(data)))

    return Checkpoint(tuple(files), finish)


def common_state(arguments: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint has beside the model: Megatron's arguments, with torch's dtype."""
    dtype = getattr(torch, arguments["params_dtype"].name)
    args = argparse.Namespace(**{**arguments, "params_dtype": dtype})
    return {"args": args, "iteration": 0, "checkpoint_version": 3.0}


def _tables(files: Sequence[_DataFile]) -> Metadata:
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for file in files:
        for part, place in zip(file.parts, file.places):
            if isinstance(part, str):
                tensors[part], index = BytesStorageMetadata(), MetadataIndex(part)
            else:
                properties = TensorProperties(getattr(torch, part.target.dtype.name))
                empty = TensorStorageMetadata(properties, torch.Size(part.whole), [])
                known = tensors.setdefault(part.key, empty).chunks
                offsets = torch.Size(part.offsets)
                index = MetadataIndex(part.key, offsets, len(known))
                known.append(ChunkStorageMetadata(offsets, torch.Size(part.sizes)))
            places[index] = _StorageInfo(file.name, *place)
    return Metadata(state_dict_metadata=tensors, storage_data=places)


def has_numbered_layers(model: Architecture) -> bool:
    """Whether layers have keys of their own: Megatron stacks them only where all are of one kind
    (megatron-core, transformer/transformer_block.py, TransformerBlock.sharded_state_dict)."""
    return model.experts is not None and len(set(model.experts.sparse)) > 1


def _chunks(work: Import, rule: Rule, layer: int) -> Iterator[OutputChunk]:
    """The parts of the tensor-parallel ranks, each in chunks of at most CHUNK_BYTES, or one row."""
    key, lead, heights = _place(work, rule, layer)
    whole = (*heights, *work.shape_of(rule, layer))
    dtype = work.dtype_of(rule, layer)
    alike = rule.split in (Split.REPLICATED, Split.LATENT)
    for rank in range(1 if alike else work.layout.tensor):
        for part in work.parts(rule, layer, rank, CHUNK_BYTES // dtype.itemsize):
            offsets, sizes = (*lead, *part.offsets), (*(1 for _ in lead), *part.sizes)
            name = f"{key}@{','.join(map(str, offsets))}"
            target = Target(name, part.sizes, dtype, part.tiles)
            yield OutputChunk(key, whole, offsets, sizes, target)


def _place(work: Import, rule: Rule, layer: int) -> Place:
    """Where a tensor goes. Local layers store norms under Transformer Engine's names too, those of
    latent attention excepted."""
    name = rule.keys[0]
    if not work.layout.fused:
        name = rule.megatron if work.model.latent is not None else rule.local_key or name
    stacked = not has_numbered_layers(work.model)
    return stacked_place(name, rule, layer, work.model, stacked)


def _extra_states(work: Import) -> list[str]:
    """Keys of the (empty) states that Megatron's modules keep beside weights, and without which it
    does not load: of linear layers, and with Transformer Engine of norms and of the attention
    itself. Those it has no module for are ignored."""
    found: dict[str, None] = {}
    for rule, layer in work.rules():
        key, lead, heights = _place(work, rule, layer)
        modules = [key.rpartition(".")[0]]
        if key.endswith("linear_proj.weight"):
            modules.append(modules[0].replace("linear_proj", "core_attention"))
        # As ShardedObject.unique_key spells it; without stacks it is object 0 of 1 (megatron-core,
        # dist_checkpointing/mapping.py and transformer/utils.py,
        # make_sharded_object_for_checkpoint).
        numbers, of = (".".join(map(str, numbers)) for numbers in (lead or (0,), heights or (1,)))
        if rule.per_layer or "layernorm" in key:
            names = (f"{module}._extra_state/shard_{numbers}_{of}" for module in modules)
            found.update(dict.fromkeys(names))
    return list(found)
