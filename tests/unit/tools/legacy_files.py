"""Legacy checkpoints for the reader's tests: one file per rank, as Megatron-LM writes them with torch.save."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rlflow_tools.ckpt_convert.dtypes import as_tensor
from rlflow_tools.ckpt_convert.export_model import architecture_of
from rlflow_tools.ckpt_convert.import_model import FOLDER, Options, to_megatron
from rlflow_tools.ckpt_convert.mapping.layout import CheckpointLayout
from rlflow_tools.ckpt_convert.mapping.plan import Target
from rlflow_tools.ckpt_convert.mapping.to_megatron import Import, make_import
from rlflow_tools.ckpt_convert.readers.arguments import arguments_of
from rlflow_tools.ckpt_convert.readers.folders import TRACKER
from rlflow_tools.ckpt_convert.readers.safetensors_files import read_huggingface
from rlflow_tools.ckpt_convert.stream import Reader
from rlflow_tools.ckpt_convert.writers.torch_dist import common_state
from torch import Tensor

from rlflow.models.architecture import own_rule, tied_output
from rlflow.models.huggingface import read_config
from rlflow.models.layer_rules import EMBEDDING
from rlflow.models.rules import Rule


def write_checkpoint(model: Path, out: Path, saved: str, layout: CheckpointLayout) -> None:
    """The checkpoint of a HuggingFace directory, as torch_dist or as `torch`, the legacy files."""
    if saved == "torch":
        write_legacy(model, out, layout)
    else:
        to_megatron(model, out, Options(layout=layout))


def write_legacy(model: Path, out: Path, layout: CheckpointLayout) -> None:
    """Writes OUT/release/mp_rank_*/model_optim_rng.pt and the tracker file."""
    config, architecture = read_config(model), architecture_of(model)
    work = make_import(read_huggingface(model), architecture, layout)
    dtype = work.dtype_of(own_rule(architecture, EMBEDDING), 0)
    arguments = arguments_of(config, architecture, layout, dtype)
    stages, experts, tensors = map(range, (layout.pipeline, layout.expert, layout.tensor))
    with Reader(work.source) as reader:
        # megatron-core, parallel_state.py: tensor ranks are neighbours, then those of experts, then stages.
        for rank, place in enumerate(itertools.product(stages, experts, tensors)):
            pipeline, expert, tensor = place
            # Named as Megatron-LM's get_checkpoint_name does.
            name = f"mp_rank_{tensor:02d}"
            name += f"_{pipeline:03d}" if layout.pipeline > 1 else ""
            name += f"_{expert:03d}" if layout.expert > 1 else ""
            state = common_state(arguments | {"rank": rank, "world_size": layout.ranks})
            for chunk in range(layout.virtual):
                label = f"model{chunk}" if layout.virtual > 1 else "model"
                state[label] = _module_state(work, reader, pipeline, chunk, expert, tensor)
            file = out / FOLDER / name / "model_optim_rng.pt"
            file.parent.mkdir(parents=True)
            torch.save({**state, "num_floating_point_operations_so_far": 0}, file)
    (out / TRACKER).write_text(FOLDER)


def _module_state(
    work: Import, reader: Reader, pipeline: int, chunk: int, expert: int, tensor: int
) -> dict[str, Tensor | None]:
    """The state of a model chunk of a rank: weights, and the empty states beside some of them."""
    state: dict[str, Tensor | None] = {}
    for name, rule, layer in _held_tensors(work, pipeline, chunk, expert):
        state[name] = _rank_tensor(work, reader, rule, layer, tensor)
        state |= _extra_state(work.layout, name)
    return state


def _rank_tensor(work: Import, reader: Reader, rule: Rule, layer: int, tensor: int) -> Tensor:
    """A tensor of a rank: its boxes of the whole one below each other."""
    boxes = []
    for part in work.parts(rule, layer, tensor, most=2**63):
        target = Target("", part.sizes, work.dtype_of(rule, layer), part.tiles)
        data = np.empty((target.rows, target.row_bytes), np.uint8)
        reader.fill(target, 0, data)
        boxes.append(as_tensor(data, target.dtype, target.shape))
    return torch.cat(boxes)


def _held_tensors(
    work: Import, pipeline: int, chunk: int, expert: int
) -> Iterator[tuple[str, Rule, int]]:
    """(name within the chunk's module, rule, layer) of the tensors that a model chunk of a rank holds."""
    layout, model = work.layout, work.model
    heights = layout.heights(model.layers)
    # Chunks come first, then ranks (megatron-core, transformer/transformer_layer.py, get_transformer_layer_offset).
    first = chunk * sum(heights) + sum(heights[:pipeline])
    layers = range(first, first + heights[pipeline])
    begins = (pipeline, chunk) == (0, 0)
    ends = (pipeline, chunk) == (layout.pipeline - 1, layout.virtual - 1)
    experts = model.experts.count // layout.expert if model.experts is not None else 1
    rules = list(work.rules())
    if model.tied and layout.pipeline > 1:
        rules.append((tied_output(model), 0))  # the last stage has a copy of the embedding
    for rule, layer in rules:
        once = begins if rule.stands_for(EMBEDDING) else ends
        if not (layer in layers if rule.per_layer else once):
            continue
        if rule.expert is not None and rule.expert // experts != expert:
            continue
        local_expert = (rule.expert or 0) % experts
        yield rule.megatron_name(layer - first, local_expert, layout.fused), rule, layer


def _extra_state(layout: CheckpointLayout, name: str) -> dict[str, Any]:
    """The empty state that the module of a weight keeps beside it, if there is one in layers of this kind."""
    module, _, parameter = name.rpartition(".")
    linear = ".linear_" in name or name == "output_layer.weight"
    if not (parameter.startswith("weight") and linear):
        return {}
    modules = [module]
    if layout.fused and module.endswith("self_attention.linear_proj"):
        modules.append(module.replace("linear_proj", "core_attention"))
    return {f"{module}._extra_state": None for module in modules}
