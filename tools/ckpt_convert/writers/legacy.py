"""The files of a legacy checkpoint, one per rank, as Megatron-LM writes them with torch.save."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlflow.models.layer_rules import EMBEDDING
from rlflow.models.rules import Rule

from ..dtypes import as_tensor
from ..mapping.layout import CheckpointLayout
from ..mapping.plan import Target, Tile
from ..mapping.to_megatron import Import
from ..stream import Copier
from .checkpoint import Checkpoint, common_state
from .files import HashedFile, OutputFile


def legacy_checkpoint(work: Import, folder: str, arguments: dict[str, Any]) -> Checkpoint:
    """One file per tensor, pipeline and expert rank below `folder`."""
    layout = work.layout
    places = itertools.product(range(layout.pipeline), range(layout.expert), range(layout.tensor))
    files = [
        _rank_file(work, folder, arguments, tensor, pipeline, expert)
        for pipeline, expert, tensor in places
    ]
    return Checkpoint(tuple(files), lambda _: None)


def _rank_file(
    work: Import, folder: str, arguments: dict[str, Any], tensor: int, pipeline: int, expert: int
) -> OutputFile:
    layout = work.layout
    # Named as Megatron-LM's get_checkpoint_name does.
    path = f"{folder}/mp_rank_{tensor:02d}"
    path += f"_{pipeline:03d}" if layout.pipeline > 1 else ""
    path += f"_{expert:03d}" if layout.expert > 1 else ""
    path += "/model_optim_rng.pt"
    # A reader knows by the rank's number a file that lies in another's place (megatron-core,
    # parallel_state.py: tensor ranks are neighbours, then those of experts, then stages).
    number = (pipeline * layout.expert + expert) * layout.tensor + tensor
    place = {"rank": number, "world_size": layout.ranks}
    value = {**common_state(arguments | place), "num_floating_point_operations_so_far": 0}
    held: list[tuple[int, str, Target]] = []
    for chunk in range(layout.virtual):
        for name, rule, layer in _held_tensors(work, pipeline, chunk, expert):
            label = f"{path}:{chunk}:{name}"
            held.append((chunk, name, _rank_target(work, rule, layer, tensor, label)))

    def write(file: HashedFile, copier: Copier) -> None:
        states: list[dict[str, Tensor | None]] = [OrderedDict() for _ in range(layout.virtual)]
        # torch.save wants all tensors of a file at once. They lie in a mapped file without a name,
        # so that the system may write them out where a rank's weights are more than its memory.
        memory = _mapped(file.path.parent, sum(target.nbytes for *_, target in held))
        at = 0
        for chunk, name, target in held:
            data = memory[at : at + target.nbytes]
            at += target.nbytes
            copier.fill(target, data)
            states[chunk][name] = as_tensor(data, target.dtype, target.shape)
            states[chunk].update(_extra_state(layout, name))
        names = ["model"] if len(states) == 1 else [f"model{chunk}" for chunk in range(len(states))]
        torch.save({**value, **dict(zip(names, states))}, file)  # type: ignore[arg-type]

    return OutputFile(path, tuple(target for *_, target in held), write)


def _rank_target(work: Import, rule: Rule, layer: int, tensor: int, label: str) -> Target:
    """A tensor of a rank: its boxes of the whole one below each other."""
    tiles: list[Tile] = []
    height = 0
    parts = work.parts(rule, layer, tensor)
    for part in parts:
        tiles += (dataclasses.replace(tile, row=height + tile.row) for tile in part.tiles)
        height += part.sizes[0]
    shape = (height, *parts[0].sizes[1:])
    return Target(label, shape, work.dtype_of(rule, layer), tuple(tiles))


def _mapped(directory: Path, nbytes: int) -> np.ndarray:
    with tempfile.TemporaryFile(dir=directory) as file:
        return np.memmap(file, np.uint8, "w+", shape=nbytes)


def _held_tensors(
    work: Import, pipeline: int, chunk: int, expert: int
) -> Iterator[tuple[str, Rule, int]]:
    """(name within the chunk's module, rule, layer) of the tensors that a model chunk of a rank
    holds."""
    layout, model = work.layout, work.model
    heights = layout.heights(model.layers)
    # Chunks come first, then ranks (megatron-core, transformer/transformer_layer.py,
    # get_transformer_layer_offset).
    first = chunk * sum(heights) + sum(heights[:pipeline])
    layers = range(first, first + heights[pipeline])
    begins = (pipeline, chunk) == (0, 0)
    ends = (pipeline, chunk) == (layout.pipeline - 1, layout.virtual - 1)
    experts = model.experts.count // layout.expert if model.experts is not None else 1
    for rule, layer in (*work.rules(), *work.tied_output()):
        once = begins if rule.stands_for(EMBEDDING) else ends
        if not (layer in layers if rule.per_layer else once):
            continue
        if rule.expert is not None and rule.expert // experts != expert:
            continue
        local_expert = (rule.expert or 0) % experts
        yield rule.megatron_name(layer - first, local_expert, layout.fused), rule, layer


def _extra_state(layout: CheckpointLayout, name: str) -> dict[str, None]:
    """The empty state that the module of a weight keeps beside it, as far as there is one in this
    kind of layers."""
    module, _, parameter = name.rpartition(".")
    linear = ".linear_" in name or name == "output_layer.weight"
    if not (parameter.startswith("weight") and linear):
        return {}
    modules = [module]
    if layout.fused and module.endswith("self_attention.linear_proj"):
        modules.append(module.replace("linear_proj", "core_attention"))
    return {f"{module}._extra_state": None for module in modules}
