"""From a Megatron checkpoint to a HuggingFace directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlflow.errors import ConversionError, ExitCode, ModelError
from rlflow.models.architecture import Architecture, stored_architecture
from rlflow.models.huggingface import companions, companions_digest, copy_files, read_config, with_dtype
from rlflow.storage.integrity import EXPORT_MANIFEST

from . import adapters
from .dtypes import OPTIONS, DType
from .mapping.plan import Plan
from .mapping.to_huggingface import Export, make_export
from .readers.arguments import contradictions
from .readers.formats import open_source
from .readers.source import Stamps, TensorSource
from .stream import Copier, Progress, check_equal
from .verify import verify_export
from .writers.directory import WriteOptions, check_output, write_directory
from .writers.safetensors import safetensors_files, write_index


@dataclass(frozen=True)
class Options:
    """How to export. dtype: a word of dtypes.OPTIONS. shard_bytes: tensor bytes per file. The rest: see `WriteOptions`."""

    dtype: str = "keep"
    shard_bytes: int = 4 * 10**9
    workers: int = 4
    overwrite: bool = False
    verify: str = "fast"
    expected: dict[str, int] = field(default_factory=dict)
    """Sizes that the checkpoint must have: fields of Architecture, `tensor_parallel`, `pipeline_parallel`, ..., `iteration`."""
    check: Callable[[Path], None] | None = None
    """A further check of the finished directory, before it gets its name."""

    @property
    def writing(self) -> WriteOptions:
        return WriteOptions(self.workers, self.overwrite, self.verify)


def prepare(path: str | Path, reference: str | Path, options: Options) -> tuple[TensorSource, Export]:
    """The checked checkpoint and the plan of its export; nothing is written. Raises ConversionError."""
    model = _architecture(reference)
    source = open_source(path)
    if adapters.description(source) is not None:
        raise ConversionError(
            f"{source.path}: holds LoRA adapters alone, which are merged into the weights of {reference}: there is no plan "
            "to show.",
            ExitCode.UNSUPPORTED,
        )
    check_sizes(source, model, options.expected)
    for name, claimed, present in contradictions(source.arguments, read_config(reference), model):
        raise ConversionError(
            f"{source.path}: was trained with {name}={claimed}, but by config.json of the reference {present}; give the "
            "reference that the training began from.",
            ExitCode.OTHER_MODEL,
        )
    export = make_export(source, model, OPTIONS[options.dtype])
    for equal in export.plan.equal:
        check_equal(source, equal)
    return source, export


def check_sizes(source: TensorSource, model: Architecture, expected: dict[str, int]) -> None:
    """Raises ConversionError (5) for a size that the user gave and the checkpoint does not have."""
    known = {**vars(model), **source.layout, "iteration": source.iteration}
    for name, value in expected.items():
        words = name.replace("_", " ")
        if known.get(name) is None:
            raise ConversionError(
                f"{source.path}: does not say its {words}, so {value} cannot be checked; leave the option out.",
                ExitCode.OTHER_LAYOUT,
            )
        if known[name] != value:
            raise ConversionError(
                f"{source.path}: {words} {value} was expected, {known[name]} found; correct the option or leave it out.",
                ExitCode.OTHER_LAYOUT,
            )


def to_huggingface(
    path: str | Path,
    out: str | Path,
    reference: str | Path,
    options: Options | None = None,
    progress: Progress = lambda count, total: None,
) -> dict[str, Any]:
    """Exports a checkpoint as a HuggingFace directory and returns its manifest.

    It is written aside, verified from disk and renamed; on failure `out` is as it was. Raises
    ConversionError, whose exit_code tells the kinds of problems apart."""
    options, out, reference = options or Options(), Path(out), Path(reference)
    check_output(out, Path(path), reference, options.overwrite)
    opened = open_source(path)
    if adapters.description(opened) is not None:
        if options.dtype != "keep":
            raise ConversionError(
                f"{path}: adapters are merged in the dtype that they were trained in; leave --dtype out.", ExitCode.UNSUPPORTED
            )
        return adapters.merge(opened, out, reference, _origin(opened), options.overwrite)
    described = Stamps(reference)
    source, export = prepare(path, reference, options)
    plan, config = export.plan, read_config(reference)
    files = safetensors_files(plan.targets, options.shard_bytes)

    def complete(partial: Path) -> None:
        write_index(partial, files)
        _add_companions(partial, reference, config, plan.targets[0].dtype)
        if options.verify == "full":
            from .inverse import check_inverse  # imports torch

            check_inverse(source, export, partial)
        if options.check is not None:
            options.check(partial)

    origin = source.identity()

    def unchanged() -> None:
        source.stamps.check(origin["files"])
        described.check(["config.json", *companions(reference)])

    return write_directory(
        out,
        files,
        options.writing,
        copier=Copier(source, plan.nbytes, progress),
        complete=complete,
        unchanged=unchanged,
        record=_record(source, export.model, plan, options.dtype, reference),
    )


def current_export(path: str | Path, out: str | Path, reference: str | Path) -> bool:
    """Whether `out` is what `to_huggingface` would write now: same checkpoint, same reference, whole, options as default."""
    if not (Path(out) / EXPORT_MANIFEST).is_file():
        return False
    try:
        manifest = verify_export(out)
    except ConversionError:
        return False
    claims = {"source": _origin(open_source(path)), "reference": companions_digest(reference), "dtype": "keep"}
    return all(manifest.get(key) == value for key, value in claims.items())


def _architecture(reference: str | Path) -> Architecture:
    config = read_config(reference)
    try:
        return stored_architecture(config)
    except ModelError as error:
        raise ConversionError(f"{reference}: {error}", ExitCode.UNKNOWN_MODEL) from None


def _add_companions(partial: Path, reference: Path, config: dict[str, Any], dtype: DType) -> None:
    copy_files(reference, partial)
    (partial / "config.json").write_text(json.dumps(with_dtype(config, dtype), indent=2) + "\n")


def _origin(source: TensorSource) -> dict[str, Any]:
    """What identifies a source. No path is in it: directories are moved and manifests published."""
    return {"format": source.format, "iteration": source.iteration, **source.identity()}


def _record(source: TensorSource, model: Architecture, plan: Plan, dtype: str, reference: Path) -> dict[str, Any]:
    """The manifest without its files."""
    return {
        "source": _origin(source),
        "reference": companions_digest(reference),
        "family": model.family,
        "tensors": len(plan.targets),
        "parameters": plan.parameters,
        "weight_bytes": plan.nbytes,
        "dtype": dtype,
    }
