"""From a Megatron checkpoint to a HuggingFace directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlflow.errors import ConversionError, ModelError
from rlflow.models.architecture import Architecture, stored_architecture
from rlflow.models.huggingface import companions, companions_digest, copy_companions, read_config
from rlflow.storage.integrity import EXPORT_MANIFEST

from . import adapters
from .dtypes import OPTIONS
from .mapping.to_huggingface import Export, make_export
from .options import Options
from .problems import other_layout, other_model, unknown_model, unsupported
from .readers.arguments import contradictions
from .readers.formats import open_source
from .readers.safetensors_files import read_huggingface
from .readers.source import Stamps, TensorSource
from .stream import Copier, Progress, check_equal
from .verify import verify_export
from .writers.directory import check_output, write_directory
from .writers.safetensors import safetensors_files, write_index_of


def prepare(source: TensorSource, reference: str | Path, options: Options) -> Export:
    """The plan of a checked checkpoint's export; nothing is written. Raises ConversionError."""
    if adapters.description(source) is not None:
        raise unsupported(
            f"{source.path}: holds LoRA adapters alone, which are merged into the weights of "
            f"{reference}: there is no plan to show."
        )
    model, config = architecture_of(reference), read_config(reference)
    check_sizes(source, model, options.expected)
    for name, claimed, present in contradictions(source.arguments, config, model):
        raise other_model(
            f"{source.path}: was trained with {name}={claimed}, but by config.json of the "
            f"reference {present}; give the reference that the training began from."
        )
    export = make_export(source, model, OPTIONS[options.dtype])
    check_equal(source, export.plan.equal)
    return export


def architecture_of(path: str | Path) -> Architecture:
    """Of a model directory. Raises ConversionError (6)."""
    config = read_config(path)
    try:
        return stored_architecture(config)
    except ModelError as error:
        raise unknown_model(f"{path}: {error}") from None


def check_sizes(source: TensorSource, model: Architecture, expected: dict[str, int]) -> None:
    """Raises ConversionError (5) for a size that the user gave and the checkpoint does not have."""
    known = {**vars(model), **source.layout, "iteration": source.iteration}
    for name, value in expected.items():
        words, found = name.replace("_", " "), known.get(name)
        if found != value:
            told = "not recorded" if found is None else f"{found} found"
            raise other_layout(
                f"{source.path}: {words} {value} was expected, {told}; correct the option or leave "
                "it out."
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
    check_output(out, options.overwrite, reference, Path(path))
    source = open_source(path)
    if (lora := adapters.description(source)) is not None:
        if options.dtype != "keep":
            raise unsupported(
                f"{path}: adapters are merged in the dtype that they were trained in; leave "
                "--dtype out."
            )
        if options.verify not in ("fast", "none"):
            raise unsupported(
                f"{path}: holds LoRA adapters, whose merge is verified fast alone, found --verify "
                f"{options.verify}; leave it out."
            )
        check_sizes(source, architecture_of(reference), options.expected)
        return adapters.merge(source, lora, out, reference, _origin(source), options)
    described = Stamps(reference)
    export, config = prepare(source, reference, options), read_config(reference)
    plan, origin = export.plan, _origin(source)
    files = safetensors_files(plan.targets, options.shard_bytes)

    def complete(partial: Path) -> None:
        write_index_of(partial, files)
        copy_companions(reference, partial, config, plan.targets[0].dtype)
        if options.verify == "full":
            from .inverse import check_inverse  # imports torch

            result = read_huggingface(partial)
            check_inverse(source, export, result, written=result)
        elif options.verify == "logits":
            from .oracle.logits import check_logits

            check_logits(Path(path), partial, options.dtype)

    def unchanged() -> None:
        source.stamps.check(origin["files"])
        described.check(["config.json", *companions(reference)])

    record = {
        "source": origin,
        "reference": companions_digest(reference),
        "family": export.model.family,
        "tensors": len(plan.targets),
        "parameters": plan.parameters,
        "weight_bytes": plan.nbytes,
        "dtype": options.dtype,
        **({"remark": source.remark()} if source.passed_over else {}),
    }
    copier = Copier(source, plan.nbytes, progress)
    return write_directory(out, files, options, copier, complete, unchanged, record)


def current_export(path: str | Path, out: str | Path, reference: str | Path) -> bool:
    """Whether `out` is what `to_huggingface` would write now: same checkpoint, same reference,
    whole, options as default."""
    if not (Path(out) / EXPORT_MANIFEST).is_file():
        return False
    try:
        manifest = verify_export(out)
    except ConversionError:
        return False
    claims = {"source": _origin(open_source(path)), "reference": companions_digest(reference)}
    return manifest.get("dtype") == "keep" and all(
        manifest.get(key) == value for key, value in claims.items()
    )


def _origin(source: TensorSource) -> dict[str, Any]:
    """What identifies a source. No path is in it: directories are moved and manifests published."""
    return {"format": source.format, "iteration": source.iteration, **source.identity()}
