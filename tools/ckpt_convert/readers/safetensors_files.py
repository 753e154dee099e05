"""A HuggingFace model directory as a source: which bytes of which safetensors file hold what."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from rlflow.errors import ModelError
from rlflow.models.huggingface import INDEX_FILE, WeightFiles, header, weight_files
from rlflow.storage.pickles import Chunk

from ..dtypes import FLOAT8, FLOAT32, WEIGHTS
from ..problems import damaged, missing, unsupported
from .source import SCALED, ChunkPlace, Stamps, StoredTensor, TensorSource

DTYPES = {dtype.safetensors: dtype for dtype in (*WEIGHTS, FLOAT8)}
"""Of a safetensors header."""
SCALES = ".weight_scale_inv"
"""Ending of what holds the scales of a weight in 8 bits."""


def read_huggingface(path: Path) -> TensorSource:
    """The checked tables of a model directory: every file there, each tensor's bytes its own and as
    many as its shape says. safetensors have no checksums.

    Raises ConversionError for a file that is missing (3) or damaged (4), and for a dtype that is
    not supported (10)."""
    stamps = Stamps(path)
    try:
        for name in weight_files(path) if (path / INDEX_FILE).is_file() else ():
            if not (path / name).is_file():
                raise missing(
                    f"{path / name}: missing, though {INDEX_FILE} lists it; copy the whole model."
                )
        weights = WeightFiles(path, everything=True)
        headers = {
            file: header(path / file) for file in {weights.file_of(name) for name in weights}
        }
        stored = {}
        for name in weights:
            file = weights.file_of(name)
            stored[name] = _stored(path, file, name, headers[file][name])
    except ModelError as error:
        raise damaged(str(error)) from None
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise damaged(
            f"{path}: a safetensors header is damaged ({error}); copy the model again."
        ) from None
    tensors = {
        name: _with_scales(path, tensor, stored)
        for name, tensor in stored.items()
        if not name.endswith(SCALES)
    }
    tables = (name for name in ("config.json", INDEX_FILE) if (path / name).is_file())
    return TensorSource(
        path=path,
        format="huggingface",
        tensors=tensors,
        place_of=lambda stored, chunk: ChunkPlace(chunk.start),
        stamps=stamps,
        tables=tuple(tables),
    )


def _stored(path: Path, file: str, name: str, entry: dict[str, Any]) -> StoredTensor:
    if entry["dtype"] not in DTYPES:
        raise unsupported(
            f"{path / file}: '{name}' is of dtype {entry['dtype']}, which is not supported; "
            f"expected one of {', '.join(DTYPES)}."
        )
    dtype, shape = DTYPES[entry["dtype"]], tuple(int(size) for size in entry["shape"])
    first, last = entry["data_offsets"]
    nbytes = math.prod(shape) * dtype.itemsize
    if last - first != nbytes or min(shape, default=1) < 1 or first < 0:
        raise ValueError(f"'{name}' has {last - first} bytes and shape {shape}")
    with (path / file).open("rb") as stream:
        data = 8 + int.from_bytes(stream.read(8), "little")
    chunk = Chunk((0,) * len(shape), shape, file, data + first, nbytes)
    return StoredTensor(name, shape, dtype, (chunk,))


def _with_scales(path: Path, tensor: StoredTensor, stored: dict[str, StoredTensor]) -> StoredTensor:
    """The tensor itself, or one in 8 bits with its scales."""
    if tensor.dtype is not FLOAT8:
        return tensor
    scales = stored.get(tensor.name.removesuffix(".weight") + SCALES)
    blocks = tuple(-(-size // SCALED) for size in tensor.shape)
    if scales is None or (scales.shape, scales.dtype) != (blocks, FLOAT32) or len(blocks) != 2:
        found = "none" if scales is None else f"{scales.dtype} {scales.shape}"
        raise unsupported(
            f"{path}: '{tensor.name}' is in 8 bits; expected scales in float32 {blocks} beside it, "
            f"found {found}."
        )
    return dataclasses.replace(tensor, scales=scales)
