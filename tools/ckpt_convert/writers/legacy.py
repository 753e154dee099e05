"""The files of a legacy checkpoint, one per rank, as Megatron-LM writes them with torch.save."""

from __future__ import annotations

import argparse
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlflow.models.rules import Rule
from rlflow.models.tables import EMBEDDING

from ..mapping.plan import Target
from ..mapping.to_megatron import Import
from ..stream import Copier
from .checkpoint import as_tensor
from .files import HashedFile, OutputFile

FILE = "model_optim_rng.pt"


def legacy_files(work: Import, folder: str, common: dict[str, Any]) -> list[OutputFile]:
    """One file per tensor, pipeline and expert rank below `folder`."""
    layout = work.layout
    return [
        _rank_file(work, folder, common, tensor, pipeline, expert)
        for pipeline in range(layout.pipeline)
        for expert in range(layout.expert)
        for tensor in range(layout.tensor)
    ]


def rank_directory(work: Import, tensor: int, pipeline: int, expert: int) -> str:
    """A rank's directory, named as Megatron-LM's get_checkpoint_name does."""
    name = f"mp_rank_{tensor:02d}"
    name += f"_{pipeline:03d}" if work.layout.pipeline > 1 else ""
    return name + (f"_{expert:03d}" if work.layout.expert > 1 else "")


def _rank_file(
    work: Import, folder: str, common: dict[str, Any], tensor: int, pipeline: int, expert: int
) -> OutputFile:
    path = f"{folder}/{rank_directory(work, tensor, pipeline, expert)}/{FILE}"
    value = {**common, "args": _args_of(work, common["args"], tensor, pipeline, expert)}
    held: list[tuple[int, str, Target]] = []
    for chunk in range(work.layout.virtual):
        for name, rule, layer in _held_tensors(work, pipeline, chunk, expert):
            part = work.rank_slice(rule, layer, tensor)
            columns = part.shape[1] if len(part.shape) > 1 else 1
            dtype = work.dtype_of(rule, layer)
            label = f"{path}:{chunk}:{name}"
            held.append((chunk, name, Target(label, part.shape, dtype, columns, part.tiles)))

    def write(file: HashedFile, copier: Copier) -> None:
        states: list[OrderedDict[str, Tensor | None]] = [OrderedDict() for _ in range(work.layout.virtual)]
        # torch.save wants all tensors of a file at once. They lie in a mapped file without a name,
        # so that the system may write them out where a rank's weights are more than its memory.
        memory = _mapped(file.directory, sum(target.nbytes for *_, target in held))
        at = 0
        for chunk, name, target in held:
            data = memory[at : at + target.nbytes]
            at += target.nbytes
            copier.fill(target, data)
            states[chunk][name] = as_tensor(data, target, target.shape)
            states[chunk].update(_extra_state(work, name))
        names = ["model"] if len(states) == 1 else [f"model{chunk}" for chunk in range(len(states))]
        torch.save({**value, **dict(zip(names, states))}, file)  # type: ignore[arg-type]

    return OutputFile(path, tuple(target for *_, target in held), write)


def _mapped(directory: Path, nbytes: int) -> np.ndarray:
    with tempfile.TemporaryFile(dir=directory) as file:
        return np.memmap(file, np.uint8, "w+", shape=nbytes)


def _args_of(work: Import, args: argparse.Namespace, tensor: int, pipeline: int, expert: int) -> argparse.Namespace:
    """The arguments with the number of the rank, by which a reader knows a file that lies in another's place (megatron-core,
    parallel_state.py: tensor ranks are neighbours, then those of experts, then stages)."""
    layout = work.layout
    number = (pipeline * layout.expert + expert) * layout.tensor + tensor
    return argparse.Namespace(**{**vars(args), "rank": number, "world_size": layout.tensor * layout.expert * layout.pipeline})


def _held_tensors(work: Import, pipeline: int, chunk: int, expert: int) -> Iterator[tuple[str, Rule, int]]:
    """(name within the chunk's module, rule, layer) of the tensors that a model chunk of a rank holds."""
    layout, model = work.layout, work.model
    heights = layout.heights(model.layers)
    # Chunks come first, then ranks (megatron-core, transformer/transformer_layer.py, get_transformer_layer_offset).
    first, height = chunk * sum(heights) + sum(heights[:pipeline]), heights[pipeline]
    begins = pipeline == 0 and chunk == 0
    ends = pipeline == layout.pipeline - 1 and chunk == layout.virtual - 1
    experts = model.experts.count // layout.expert if model.experts is not None else 1
    for rule, layer in (*work.rules(), *work.tied_output()):
        if rule.per_layer and not first <= layer < first + height:
            continue
        if not rule.per_layer and not (begins if rule is EMBEDDING else ends):
            continue
        if rule.expert is not None and rule.expert // experts != expert:
            continue
        yield rule.megatron_name(layer - first, (rule.expert or 0) % experts, layout.fused), rule, layer


def _extra_state(work: Import, name: str) -> dict[str, None]:
    """The empty state that the module of a weight keeps beside it, as far as there is one in this kind of layers."""
    module, _, parameter = name.rpartition(".")
    if not (parameter.startswith("weight") and (".linear_" in name or name == "output_layer.weight")):
        return {}
    found = {f"{module}._extra_state": None}
    if work.layout.fused and module.endswith("self_attention.linear_proj"):
        found[f"{module.removesuffix('linear_proj')}core_attention._extra_state"] = None
    return found


def legacy_common(args: argparse.Namespace) -> dict[str, Any]:
    """What every file holds beside the model."""
    return {"args": args, "checkpoint_version": 3.0, "iteration": 0, "num_floating_point_operations_so_far": 0}
