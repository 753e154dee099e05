"""From a HuggingFace directory to a Megatron checkpoint."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlflow.models.architecture import huggingface_shapes, own_rule
from rlflow.models.entries import predicting_layers
from rlflow.models.huggingface import read_config
from rlflow.models.layer_rules import EMBEDDING

from .dtypes import OPTIONS
from .export_model import architecture_of
from .mapping.plan import Plan
from .mapping.to_huggingface import make_export
from .mapping.to_megatron import Import, make_import
from .options import Options
from .readers.arguments import arguments_of, flags_to_give
from .readers.folders import TRACKER
from .readers.formats import open_source
from .readers.safetensors_files import read_huggingface
from .stream import Copier, Progress, check_equal
from .writers.directory import check_output, write_directory
from .writers.torch_dist import Checkpoint, torch_dist_checkpoint

FOLDER = "release"
"""Where Megatron looks for weights without an iteration: it then loads neither optimizer nor
generators."""


def prepare_import(path: str | Path, options: Options) -> tuple[Import, Checkpoint, Plan]:
    """The checked model, its checkpoint, and the plan of the weights in it; nothing is written.
    Raises ConversionError."""
    config, model = read_config(path), architecture_of(path)
    source, later = read_huggingface(Path(path)), predicting_layers(config)
    work = make_import(source, model, options.layout, OPTIONS[options.dtype], later)
    arguments = arguments_of(
        config, model, options.layout, work.dtype_of(own_rule(model, EMBEDDING), 0)
    )
    checkpoint = torch_dist_checkpoint(work, FOLDER, arguments, options.shard_bytes)
    plan = Plan(tuple(target for file in checkpoint.files for target in file.targets), work.equal)
    plan.check()
    return work, checkpoint, plan


def to_megatron(
    path: str | Path,
    out: str | Path,
    options: Options | None = None,
    progress: Progress = lambda count, total: None,
) -> dict[str, Any]:
    """Writes a Megatron checkpoint of a HuggingFace directory and returns its manifest.

    It is written aside, verified from disk and renamed; on failure `out` is as it was. Raises
    ConversionError, whose exit_code tells the kinds of problems apart."""
    options, out, path = options or Options(), Path(out), Path(path)
    check_output(out, options.overwrite, path)
    work, checkpoint, plan = prepare_import(path, options)
    check_equal(work.source, plan.equal)

    def complete(partial: Path) -> None:
        checkpoint.finish(partial)
        (partial / TRACKER).write_text(FOLDER)
        if options.verify == "full":
            from .inverse import check_inverse

            result = open_source(partial)
            check_inverse(result, make_export(result, work.model), work.source, written=result)
        elif options.verify == "logits":
            from .oracle.logits import check_logits

            check_logits(partial, path, options.dtype)

    origin, shapes = work.source.identity(), huggingface_shapes(work.model)
    record = {
        "source": {"format": work.source.format, **origin},
        "family": work.model.family,
        "format": "torch_dist",
        "layout": asdict(options.layout),
        "tensors": len(shapes),
        "parameters": sum(map(math.prod, shapes.values())),
        "weight_bytes": plan.nbytes,
        "dtype": options.dtype,
        "left_out": list(work.left_out),
        "flags_to_give": flags_to_give(read_config(path), work.model),
    }
    return write_directory(
        out,
        checkpoint.files,
        options,
        Copier(work.source, plan.nbytes, progress),
        complete,
        lambda: work.source.stamps.check(origin["files"]),
        record,
    )
