"""From a Megatron checkpoint to a HuggingFace directory: planned, streamed, verified, renamed into place."""

from __future__ import annotations

import hashlib
import json
import shutil
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlflow.errors import ConversionError, ExitCode, ModelError
from rlflow.weights.families import stored_architecture
from rlflow.weights.hf import WeightFiles, copy_files, header, read_config, replace_directory, verify_model, with_dtype
from rlflow.weights.plan import Plan, Source, make_plan
from rlflow.weights.rules import Split
from rlflow.weights.split import shard as to_megatron
from rlflow.weights.stream import Block, Progress, blocks_of, layout, write_shards
from rlflow.weights.torch_dist import TorchDist

MANIFEST = "manifest.json"
"""Of an export: where it came from, and size and sha256 of every other file."""
DTYPES = {"keep": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
VERIFICATIONS = ("fast", "full", "none")
READ_BYTES = 4 << 20


@dataclass(frozen=True)
class Options:
    """How to export. dtype: a key of DTYPES. shard_bytes: tensor bytes per file. verify: one of VERIFICATIONS."""

    dtype: str = "keep"
    shard_bytes: int = 4 << 30
    workers: int = 2
    overwrite: bool = False
    verify: str = "fast"


def prepare(path: str | Path, reference: str | Path, options: Options) -> tuple[TorchDist, Plan]:
    """The checked checkpoint and the plan of its export; nothing is written. Raises ConversionError."""
    config = read_config(reference)
    try:
        model = stored_architecture(config)
    except ModelError as error:
        raise ConversionError(f"{reference}: {error}", ExitCode.UNKNOWN_MODEL) from None
    checkpoint = TorchDist(path)
    return checkpoint, make_plan(checkpoint, model, DTYPES[options.dtype])


def check_output(out: Path, checkpoint: Path, reference: Path, overwrite: bool) -> None:
    """Raises ConversionError (9) unless `out` may be written: absent, or a model directory that may be replaced, and
    neither inside the checkpoint nor around it or the reference."""
    place, source, model = out.resolve(), checkpoint.resolve(), reference.resolve()
    if place == source or source in place.parents:
        raise ConversionError(f"{out}: lies in the checkpoint; choose another directory.", ExitCode.OUTPUT_EXISTS)
    if place in source.parents or place == model or place in model.parents:
        what = "the reference" if place == model or place in model.parents else "the checkpoint"
        raise ConversionError(f"{out}: holds {what}; choose another directory.", ExitCode.OUTPUT_EXISTS)
    if not out.exists() and not out.is_symlink():
        return
    if not overwrite:
        raise ConversionError(f"{out}: exists; choose another directory or pass --overwrite.", ExitCode.OUTPUT_EXISTS)
    if out.is_symlink() or not out.is_dir() or (any(out.iterdir()) and not (out / "config.json").is_file()):
        raise ConversionError(
            f"{out}: is not a model directory (no config.json), so --overwrite does not replace it; choose another.",
            ExitCode.OUTPUT_EXISTS,
        )


def to_huggingface(
    path: str | Path,
    out: str | Path,
    reference: str | Path,
    options: Options | None = None,
    progress: Progress = lambda count: None,
) -> dict[str, Any]:
    """Exports a checkpoint as a HuggingFace directory and returns its manifest.

    It is written to `<out>.partial`, verified from disk and renamed; on failure `out` is as it was. progress: called
    with the number of bytes written. Raises ConversionError, whose exit_code tells the kinds of problems apart."""
    options, out, reference = options or Options(), Path(out), Path(reference)
    check_output(out, Path(path), reference, options.overwrite)
    checkpoint, plan = prepare(path, reference, options)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise ConversionError(f"{partial}: cannot be made ({error.strerror}).", ExitCode.DISK_FULL) from None
    try:
        shards = layout(plan, options.shard_bytes)
        checksums = write_shards(checkpoint, plan, shards, partial, options.workers, progress)
        copy_files(reference, partial)
        config = with_dtype(read_config(reference), plan.targets[0].dtype)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if options.verify != "none":
            _check_headers(partial, plan)
            _check_blocks(partial, list(blocks_of(shards)), checksums)
        if options.verify == "full":
            check_inverse(checkpoint, plan, partial)
        manifest = _manifest(checkpoint, plan, partial, options)
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        replace_directory(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return manifest


def verify_export(path: str | Path) -> dict[str, Any]:
    """The manifest of an export, every file of which has the size and sha256 that it says, and whose tensors are those
    that config.json implies, finite. Raises ConversionError (3: a file is missing, 4: another content)."""
    path = Path(path)
    file = path / MANIFEST
    if not file.is_file():
        raise ConversionError(f"{file}: missing; only directories written by to-hf can be verified.", ExitCode.MISSING)
    try:
        manifest = json.loads(file.read_text())
        listed = {str(name): (int(one["bytes"]), str(one["sha256"])) for name, one in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionError(f"{file}: damaged ({error}); export again.", ExitCode.DAMAGED) from None
    for name, (size, expected) in listed.items():
        one = path / name
        if not one.is_file():
            raise ConversionError(f"{one}: missing, though {MANIFEST} lists it; export again.", ExitCode.MISSING)
        if one.stat().st_size != size or _sha256(one) != expected:
            raise ConversionError(
                f"{one}: not what was written ({one.stat().st_size} bytes found, {size} expected); export again.",
                ExitCode.DAMAGED,
            )
    foreign = sorted(one.name for one in path.glob("*.safetensors") if one.name not in listed)
    if foreign:
        raise ConversionError(f"{path / foreign[0]}: not part of the export; remove it.", ExitCode.DAMAGED)
    try:
        verify_model(path)
    except ModelError as error:
        raise ConversionError(str(error), ExitCode.DAMAGED) from None
    return manifest


def check_inverse(checkpoint: TorchDist, plan: Plan, directory: Path) -> None:
    """Raises ConversionError (4) unless the written tensors, mapped back to Megatron's, are the checkpoint's bytes.

    Maps whole tensors with the trainer's own `split.shard`, not with the row ranges that wrote them, and checks the
    checksums that the checkpoint's archives hold. Memory: a few times the largest tensor."""
    files = WeightFiles(directory)
    for rule, layer, source in plan.sources:
        tensors = [files[name] for name in rule.names(layer)]
        mapped = to_megatron(rule, tensors, plan.model, 0, 1)
        for found, offsets in _stored_parts(checkpoint, source):
            region = tuple(slice(at, at + size) for at, size in zip(offsets, found.shape))
            expected = mapped[region]
            if rule.split is Split.VOCAB:  # rows of padding are dropped
                found = found[: expected.shape[0]]
            if not _same_bytes(found.to(mapped.dtype), expected):
                raise ConversionError(
                    f"{directory}: '{rule.names(layer)[0]}' does not map back to '{source.stored.name}' "
                    f"(chunk at {offsets}); the checkpoint changed while it was read, or this is a bug.",
                    ExitCode.DAMAGED,
                )


def _stored_parts(checkpoint: TorchDist, source: Source) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    for item, skipped, offsets, sizes in source.pieces():
        content = checkpoint.content(source.stored, item)
        with (checkpoint.path / item.file).open("rb") as stream:
            stream.seek(content.start)
            data = bytearray(stream.read(content.bytes))
        if len(data) != content.bytes or zlib.crc32(data) != content.crc32:
            raise ConversionError(
                f"{checkpoint.path / item.file}: '{source.stored.name}' at byte {content.start} is damaged (checksum); "
                "copy it again or use an earlier checkpoint.",
                ExitCode.DAMAGED,
            )
        whole = torch.frombuffer(data, dtype=source.stored.dtype)
        elements = torch.Size(sizes).numel()
        yield whole[skipped : skipped + elements].view(sizes), offsets


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    views = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return one.shape == other.shape and torch.equal(*views)


def _check_headers(directory: Path, plan: Plan) -> None:
    """The files hold every tensor of the plan and nothing else, in their shapes and sizes."""
    found: dict[str, Any] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found.update(header(file))
    expected = {target.name: (list(target.shape), target.nbytes) for target in plan.targets}
    sizes = {name: (one["shape"], one["data_offsets"][1] - one["data_offsets"][0]) for name, one in found.items()}
    if sizes != expected:
        wrong = sorted(name for name in {*sizes, *expected} if sizes.get(name) != expected.get(name))
        raise ConversionError(f"{directory}: '{wrong[0]}' was not written as planned.", ExitCode.DAMAGED)


def _check_blocks(directory: Path, blocks: Sequence[Block], checksums: dict[tuple[str, int], int]) -> None:
    """What is on the disk is what was in memory when it was checked for NaN and Inf."""
    for block in blocks:
        with (directory / block.file).open("rb") as stream:
            stream.seek(block.offset)
            if zlib.crc32(stream.read(block.size)) != checksums[block.file, block.offset]:
                raise ConversionError(
                    f"{directory / block.file}: '{block.target.name}' reads back differently than it was written; the "
                    "disk or the memory is faulty.",
                    ExitCode.DAMAGED,
                )


def _manifest(checkpoint: TorchDist, plan: Plan, directory: Path, options: Options) -> dict[str, Any]:
    files = sorted(file for file in directory.iterdir() if file.is_file())
    return {
        "source": {
            "checkpoint": checkpoint.path.resolve().as_posix(),
            "format": "torch_dist",
            "iteration": checkpoint.iteration,
            "metadata_sha256": _sha256(checkpoint.path / ".metadata"),
        },
        "family": plan.model.family,
        "tensors": len(plan.targets),
        "parameters": plan.parameters,
        "weight_bytes": plan.nbytes,
        "dtype": options.dtype,
        "verified": options.verify,
        "files": {file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in files},
    }


def _sha256(file: Path) -> str:
    content = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(READ_BYTES):
            content.update(block)
    return content.hexdigest()
