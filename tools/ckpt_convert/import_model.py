"""From a HuggingFace directory to a Megatron checkpoint, by the same writer as the other direction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlflow.errors import ConversionError, ExitCode, ModelError
from rlflow.models.architecture import Architecture, stored_architecture
from rlflow.models.huggingface import read_config
from rlflow.models.tables import EMBEDDING

from .dtypes import OPTIONS
from .mapping.plan import Plan, View
from .mapping.to_huggingface import make_export
from .mapping.to_megatron import CheckpointLayout, Import, make_import, parameters
from .readers.arguments import arguments_of, flags_to_give
from .readers.formats import open_source
from .readers.safetensors_files import HuggingFace
from .readers.source import TensorSource
from .stream import Copier, Progress, Reader, check_equal
from .verify import check_records
from .writers.checkpoint import Checkpoint, namespace
from .writers.directory import WriteOptions, check_output, write_directory
from .writers.legacy import legacy_common, legacy_files
from .writers.torch_dist import torch_dist_checkpoint

FORMATS = ("torch_dist", "torch")
FOLDER = "release"
"""Where Megatron looks for weights without an iteration: it then loads neither optimizer nor generators."""
TRACKER = "latest_checkpointed_iteration.txt"
COMPARED_BYTES = 4 << 20


@dataclass(frozen=True)
class ImportOptions:
    """How to write. format: one of FORMATS. dtype: a word of dtypes.OPTIONS. shard_bytes: tensor bytes per file of torch_dist.
    check: a further check of the finished directory, before it gets its name. The rest: see `WriteOptions`."""

    layout: CheckpointLayout = field(default_factory=CheckpointLayout)
    format: str = "torch_dist"
    dtype: str = "keep"
    shard_bytes: int = 4 * 10**9
    workers: int = 4
    overwrite: bool = False
    verify: str = "fast"
    check: Callable[[Path], None] | None = None

    @property
    def writing(self) -> WriteOptions:
        return WriteOptions(self.workers, self.overwrite, self.verify)


def prepare_import(path: str | Path, options: ImportOptions) -> tuple[Import, Checkpoint, Plan]:
    """The checked model, its checkpoint, and the plan of the weights in it; nothing is written.
    Raises ConversionError."""
    config = read_config(path)
    try:
        model = stored_architecture(config)
    except ModelError as error:
        raise ConversionError(f"{path}: {error}", ExitCode.UNKNOWN_MODEL) from None
    predicted = int(config.get("num_nextn_predict_layers") or 0)
    dtype = OPTIONS[options.dtype]
    work = make_import(HuggingFace(path), model, options.layout, dtype, predicted)
    arguments = arguments_of(config, model, options.layout, work.dtype_of(EMBEDDING, 0))
    args = namespace(arguments)
    if options.format == "torch":
        checkpoint = Checkpoint(tuple(legacy_files(work, FOLDER, legacy_common(args))), lambda _: None)
    else:
        common = {"args": args, "iteration": 0, "checkpoint_version": 3.0}
        checkpoint = torch_dist_checkpoint(work, FOLDER, common, options.shard_bytes)
    targets = tuple(target for file in checkpoint.files for target in file.targets)
    plan = Plan(targets, work.equal)
    plan.check()
    return work, checkpoint, plan


def to_megatron(
    path: str | Path,
    out: str | Path,
    options: ImportOptions | None = None,
    progress: Progress = lambda count, total: None,
) -> dict[str, Any]:
    """Writes a Megatron checkpoint of a HuggingFace directory and returns its manifest.

    It is written aside, verified from disk and renamed; on failure `out` is as it was. Raises
    ConversionError, whose exit_code tells the kinds of problems apart."""
    options, out, path = options or ImportOptions(), Path(out), Path(path)
    check_output(out, None, path, options.overwrite)
    work, checkpoint, plan = prepare_import(path, options)
    for equal in plan.equal:
        check_equal(work.source, equal)

    def complete(partial: Path) -> None:
        checkpoint.finish(partial)
        (partial / TRACKER).write_text(FOLDER)
        if options.verify == "full":
            check_export(work.source, work.model, partial)
        if options.check is not None:
            options.check(partial)

    origin = work.source.identity()
    return write_directory(
        out,
        checkpoint.files,
        options.writing,
        copier=Copier(work.source, plan.nbytes, progress),
        complete=complete,
        unchanged=lambda: work.source.stamps.check(origin["files"]),
        record={
            "source": {"format": work.source.format, **origin},
            "family": work.model.family,
            "format": options.format,
            "layout": asdict(options.layout),
            "tensors": len(plan.targets),
            "parameters": parameters(work.model),
            "weight_bytes": plan.nbytes,
            "dtype": options.dtype,
            "left_out": list(work.left_out),
            "flags_to_give": flags_to_give(read_config(path), work.model),
        },
    )


def check_export(source: TensorSource, model: Architecture, written: Path) -> None:
    """Raises ConversionError (4) unless the written checkpoint, exported again, has the bytes of `source`.

    It is read from the disk by the readers of checkpoints, archives' checksums included, and mapped by the export's plan."""
    checkpoint = open_source(written)
    check_records(checkpoint)
    plan = make_export(checkpoint, model).plan
    for equal in plan.equal:
        check_equal(checkpoint, equal)
    with Reader(checkpoint) as back, Reader(source) as first:
        for target in plan.targets:
            step = max(1, COMPARED_BYTES // target.row_bytes)
            for row in range(0, target.rows, step):
                found = np.empty((min(step, target.rows - row), target.row_bytes), np.uint8)
                expected = np.empty_like(found)
                back.fill(target, row, found)
                first.read(View(source.tensors[target.name]), row, 0, expected, target.dtype)
                if not np.array_equal(found, expected):
                    raise ConversionError(
                        f"{written}: '{target.name}' does not map back to what {source.path} has (from row {row} on); the "
                        "model changed while it was read, or this is a bug.",
                        ExitCode.DAMAGED,
                    )
