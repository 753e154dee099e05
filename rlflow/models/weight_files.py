"""Writes a stream of weights as a HuggingFace model directory, whole and checked or not at all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlflow.errors import ModelError, StorageError
from rlflow.models.architecture import Architecture, huggingface_shapes, stored_architecture
from rlflow.models.huggingface import (
    companions_digest,
    copy_companions,
    file_names,
    in_groups,
    read_config,
    why_no_room,
    why_occupied,
    write_index,
)
from rlflow.models.layer_rules import dtype_of, is_exact
from rlflow.storage.files import replacing_directory
from rlflow.storage.integrity import EXPORT_MANIFEST, fingerprint, write_manifest

SHARD_BYTES = 4 * 10**9
Shapes = dict[str, tuple[int, ...]]


def write_model(
    path: str | Path,
    weights: Iterable[tuple[str, Tensor]],
    reference: str | Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    source: Mapping[str, Any] | None = None,
    texts: Mapping[str, str] | None = None,
    mixed: bool = False,
) -> dict[str, Any]:
    """Writes a model directory from (HuggingFace name, tensor) pairs in any order, such as a
    trainer's weights, and returns its manifest. Config, tokenizer and what else goes with the
    weights come from the directory `reference`.

    shard_bytes: tensor bytes per file, more only where one tensor alone has more; as many are in
    memory at a time. All tensors have one dtype, a router's bias float32, unless they may be mixed.
    overwrite: replaces a model directory once the new one is on disk. source: what the manifest
    says that it was made of. texts: {name: text} of files to add, in place of the reference's.

    Raises ModelError for weights that are not those which config.json implies, or not finite;
    StorageError where `path` may not be replaced or the disk is full, `path` then as it was."""
    path, reference = Path(path), Path(reference)
    if (reason := why_occupied(path, overwrite, reference=reference)) is not None:
        raise StorageError(reason)
    config = read_config(reference)
    model = _architecture(reference, config)
    dtype, stream = _with_dtype(iter(weights), path)
    shapes = huggingface_shapes(model)
    parameters = sum(map(math.prod, shapes.values()))
    manifest: dict[str, Any] = {
        "source": dict(source or {"format": "trainer"}),
        "reference": companions_digest(reference),
        "family": model.family,
        "tensors": len(shapes),
        "parameters": parameters,
        "weight_bytes": parameters * dtype.itemsize,
        "dtype": "keep",
        "verified": "fast",
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if problem := why_no_room(path, manifest["weight_bytes"]):  # before tensors are gathered
            raise StorageError(problem)
        with replacing_directory(path) as partial:
            checked = _checked(stream, shapes, None if mixed else dtype, path)
            manifest["weight_bytes"] = _write_shards(partial, checked, shard_bytes)
            own = config.get("dtype") or config.get("torch_dtype")
            copy_companions(reference, partial, config, own if mixed and own else dtype)
            for name, text in (texts or {}).items():
                (partial / name).write_text(text, encoding="utf-8")
            found = (file for file in partial.rglob("*") if file.is_file())
            files = {file.relative_to(partial).as_posix(): fingerprint(file) for file in found}
            return write_manifest(partial / EXPORT_MANIFEST, manifest, files)
    except OSError as error:
        raise StorageError(
            f"{path}: the model cannot be written ({error.strerror or error}); make room or "
            "choose another place."
        ) from error


def _with_dtype(
    weights: Iterator[tuple[str, Tensor]], path: Path
) -> tuple[torch.dtype, Iterator[tuple[str, Tensor]]]:
    """The dtype of the first of the weights that has the model's, and all of them."""
    first: list[tuple[str, Tensor]] = []
    for pair in weights:
        first.append(pair)
        if not is_exact(pair[0]):
            # iter: chain would keep a list, and what is in it
            return pair[1].dtype, chain(iter(first), weights)
    raise ModelError(f"{path}: there are no weights to write.")


def _architecture(reference: Path, config: dict[str, Any]) -> Architecture:
    try:
        return stored_architecture(config)
    except ModelError as error:
        raise ModelError(f"{reference}: {error}") from None


def _checked(
    weights: Iterable[tuple[str, Tensor]], shapes: Shapes, dtype: torch.dtype | None, path: Path
) -> Iterator[tuple[str, Tensor]]:
    """The weights on the CPU, each of which must come once, in its shape and dtype (None: any), and
    be finite."""
    left = dict(shapes)
    for name, tensor in weights:
        shape = left.pop(name, None)
        if shape is None:
            raise ModelError(
                f"{path}: tensor '{name}' is not part of the model that config.json describes, or "
                "comes twice."
            )
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{path}: '{name}' has shape {tuple(tensor.shape)}, config.json implies {shape}."
            )
        if dtype is not None and tensor.dtype is not dtype_of(name, dtype):
            raise ModelError(
                f"{path}: '{name}' has dtype {tensor.dtype}, {dtype_of(name, dtype)} expected: all "
                "have the first one's, a router's bias float32."
            )
        if not torch.stack(tensor.aminmax()).isfinite().all():  # NaN included; no temporary tensor
            raise ModelError(f"{path}: '{name}' holds NaN or Inf as {tensor.dtype}.")
        yield name, tensor.detach().cpu().contiguous()
    if left:
        raise ModelError(
            f"{path}: tensor '{next(iter(left))}' is missing, which config.json implies."
        )


def _write_shards(directory: Path, weights: Iterable[tuple[str, Tensor]], shard_bytes: int) -> int:
    """Writes files of tensors, with an index if there are several, and returns their bytes. They
    are named at the end, as names hold their number."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    written: list[tuple[Path, list[str]]] = []
    total_size = 0
    for pairs in in_groups(weights, lambda pair: pair[1].nbytes, shard_bytes):
        shard = dict(pairs)
        pairs.clear()
        total_size += sum(tensor.nbytes for tensor in shard.values())
        written.append((directory / f"{len(written)}.safetensors", list(shard)))
        try:
            save_file(shard, written[-1][0], metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        shard.clear()  # before the next one is gathered, while this name still holds the dictionary
    weight_map = {}
    for (file, names), name in zip(written, file_names(len(written))):
        file.rename(directory / name)
        weight_map.update(dict.fromkeys(names, name))
    write_index(directory, weight_map, total_size)
    return total_size
