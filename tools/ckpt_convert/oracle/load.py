"""Loads a checkpoint into the oracle's model by megatron-core's own code, without the converter's
mapping tables.

The model has Megatron's local layers, so that it can be built on a CPU. What Transformer Engine's
layers name otherwise is renamed here, by a list of its own."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from rlflow.trainer.megatron.checkpoint import without_code

from ..dtypes import as_tensor
from ..problems import damaged
from ..readers.legacy import rank_files
from ..readers.torch_archive import Window

NORMS = (
    ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    ("self_attention.linear_q_up_proj.layer_norm_weight", "self_attention.q_layernorm.weight"),
    ("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attention.kv_layernorm.weight"),
)
"""(norm of a Transformer Engine layer, fused with the product that follows; the same one of a local
layer)."""
GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)$")


def load_torch_dist(chunks: Sequence[GPTModel], path: Path, keys: Collection[str]) -> None:
    """Loads a torch_dist directory into this rank's model chunks. keys: those of the checkpoint's
    tensors. A collective.

    Raises ConversionError (4) where a parameter has no weights afterwards."""
    metadata = {
        "non_homogeneous_layers": any(re.search(r"layers\.\d+\.", key) for key in keys),
        "singleton_local_shards": any(key.endswith("linear_fc1.weight_w") for key in keys),
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    content = {
        f"model{number}": _weights(chunk.sharded_state_dict(metadata=metadata))
        for number, chunk in enumerate(chunks)
    }
    for shard in _shards(content):
        shard.key = _key(shard.key, keys)
    with tempfile.TemporaryDirectory() as folder:
        view = _without_common(path, Path(folder))
        with without_code(view):
            loaded = dist_checkpointing.load(content, str(view))
    for number, chunk in enumerate(chunks):
        _load(chunk, loaded[f"model{number}"], str(path))


def _without_common(path: Path, folder: Path) -> Path:
    """The checkpoint in another folder with an empty common.pt: its own may hold objects of other
    programs, which torch refuses to load, and no weights."""
    for file in path.iterdir():
        if file.is_file() and file.name != "common.pt":
            (folder / file.name).symlink_to(file.resolve())
    torch.save({}, folder / "common.pt")
    return folder


def load_rank(chunks: Sequence[GPTModel], path: Path) -> None:
    """Loads the legacy file of this rank into its model chunks. Raises ConversionError (4) as
    above."""
    place = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    )
    ranks = {(rank.tensor, rank.pipeline, rank.expert): rank for rank in rank_files(path)}
    rank = ranks[place]
    with (path / rank.name).open("rb") as file:
        for chunk, windows in zip(chunks, rank.chunks, strict=True):
            parameters = dict(chunk.named_parameters())
            state = {}
            for name, window in windows.items():
                name = _local_name(name)
                state[name] = _part(_tensor(file, window), parameters.get(name))
            _load(chunk, state, str(path))


def _tensor(file: IO[bytes], window: Window) -> Tensor:
    file.seek(window.start)
    return as_tensor(np.fromfile(file, np.uint8, window.nbytes), window.dtype, window.shape)


def _load(chunk: GPTModel, state: Mapping[str, Any], origin: str) -> None:
    found = chunk.load_state_dict(dict(state), strict=False)
    names = (*found.missing_keys, *found.unexpected_keys)
    wrong = [name for name in names if not name.endswith("_extra_state")]
    if wrong:
        raise damaged(
            f"{origin}: Megatron's model and the checkpoint differ in {len(wrong)} tensors, first "
            f"'{wrong[0]}'."
        )


def _weights(value: Any) -> Any:
    """A sharded state without the empty states of modules, which not every checkpoint has."""
    return {name: item for name, item in value.items() if not isinstance(item, ShardedObject)}


def _shards(value: Any) -> Iterator[ShardedTensor | ShardedTensorFactory]:
    if isinstance(value, ShardedTensor | ShardedTensorFactory):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _shards(item)


def _key(key: str, keys: Collection[str]) -> str:
    """The key that the checkpoint has a tensor under: as local layers say, or as Transformer
    Engine's do."""
    if key in keys:
        return key
    for fused, local in NORMS:
        for ours, theirs in ((local, fused), (fused, local)):
            if key.endswith(ours) and key.removesuffix(ours) + theirs in keys:
                return key.removesuffix(ours) + theirs
    return key


def _local_name(name: str) -> str:
    for fused, local in NORMS:
        if name.endswith(fused):
            return name.removesuffix(fused) + local
    return GROUPED_EXPERT.sub(r"mlp.experts.local_experts.\2.\1.weight", name)


def _part(value: Tensor, parameter: Tensor | None) -> Tensor:
    """The rank's rows of what Transformer Engine keeps whole on every rank."""
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    if parameter is None or value.shape[0] != ranks * parameter.shape[0]:
        return value
    return value.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
