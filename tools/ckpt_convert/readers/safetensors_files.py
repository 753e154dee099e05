"""A HuggingFace model directory as a source: which bytes of which safetensors file hold what."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlflow.errors import ConversionError, ExitCode, ModelError
from rlflow.models.huggingface import INDEX_FILE, WeightFiles, header
from rlflow.storage.pickles import Chunk

from ..dtypes import FLOAT8, FLOAT32, WEIGHTS
from .source import SCALED, Content, Record, Stamps, StoredTensor, identity_of

DTYPES = {dtype.safetensors: dtype for dtype in (*WEIGHTS, FLOAT8)}
"""Of a safetensors header."""
SCALES = ".weight_scale_inv"
"""Ending of what holds the scales of a weight in 8 bits."""


class HuggingFace:
    """A model directory's tables, checked: every file there, each tensor's bytes its own and as many as its shape says.

    Raises ConversionError for a file that is missing (3) or damaged (4), and for a dtype that is not supported (10)."""

    format = "huggingface"
    copies: tuple[tuple[StoredTensor, StoredTensor], ...] = ()
    iteration = None

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.stamps = Stamps(self.path)
        self.layout: dict[str, int] = {}
        self.described: dict[str, Any] = {}
        self.arguments: dict[str, Any] = {}
        self._check_files()
        try:
            weights = WeightFiles(self.path)
            self._files = sorted({weights.file_of(name) for name in weights})
            headers = {file: header(self.path / file) for file in self._files}
            stored = {name: self._stored(name, weights.file_of(name), headers) for name in weights}
            self.tensors = {
                name: self._with_scales(tensor, stored) for name, tensor in stored.items() if not name.endswith(SCALES)
            }
        except ModelError as error:
            raise ConversionError(str(error), ExitCode.DAMAGED) from None
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise ConversionError(
                f"{self.path}: a safetensors header is damaged ({error}); copy the model again.", ExitCode.DAMAGED
            ) from None

    def content(self, stored: StoredTensor, chunk: Chunk) -> Content:
        """See `TensorSource.content`. safetensors have no checksums."""
        return Content(chunk.start, chunk.length)

    def records(self) -> Iterator[tuple[str, Record]]:
        """Nothing: safetensors have no checksums."""
        return iter(())

    def identity(self) -> dict[str, Any]:
        """See `TensorSource.identity`."""
        tables = [name for name in ("config.json", INDEX_FILE) if (self.path / name).is_file()]
        return identity_of(self.path, self._files, tables)

    def _check_files(self) -> None:
        index = self.path / INDEX_FILE
        if not index.is_file():
            return
        try:
            names = set(json.loads(index.read_bytes())["weight_map"].values())
            missing = sorted(name for name in names if not (self.path / name).is_file())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConversionError(f"{index}: damaged ({error}); copy the model again.", ExitCode.DAMAGED) from None
        if missing:
            raise ConversionError(
                f"{self.path / missing[0]}: missing, though {INDEX_FILE} lists it ({len(names) - len(missing)} of "
                f"{len(names)} files found); copy the whole model.",
                ExitCode.MISSING,
            )

    def _stored(self, name: str, file: str, headers: dict[str, Any]) -> StoredTensor:
        entry = headers[file][name]
        if entry["dtype"] not in DTYPES:
            raise ConversionError(
                f"{self.path / file}: '{name}' is of dtype {entry['dtype']}, which is not supported; expected one of "
                f"{', '.join(DTYPES)}.",
                ExitCode.UNSUPPORTED,
            )
        dtype, shape = DTYPES[entry["dtype"]], tuple(int(size) for size in entry["shape"])
        first, last = entry["data_offsets"]
        if last - first != math.prod(shape) * dtype.itemsize or min(shape, default=1) < 1 or first < 0:
            raise ValueError(f"'{name}' has {last - first} bytes and shape {shape}")
        start = _data(self.path / file) + first
        return StoredTensor(name, shape, dtype, (Chunk((0,) * len(shape), shape, file, start, last - first),))

    def _with_scales(self, tensor: StoredTensor, stored: dict[str, StoredTensor]) -> StoredTensor:
        """The tensor itself, or one in 8 bits with its scales."""
        if tensor.dtype is not FLOAT8:
            return tensor
        scales = stored.get(tensor.name.removesuffix(".weight") + SCALES)
        blocks = tuple(-(-size // SCALED) for size in tensor.shape)
        if scales is None or (scales.shape, scales.dtype) != (blocks, FLOAT32) or len(blocks) != 2:
            found = "none" if scales is None else f"{scales.dtype} {scales.shape}"
            raise ConversionError(
                f"{self.path}: '{tensor.name}' is in 8 bits; expected scales in float32 {blocks} beside it, found {found}.",
                ExitCode.UNSUPPORTED,
            )
        return dataclasses.replace(tensor, scales=scales)


def _data(file: Path) -> int:
    """Where the tensors' bytes begin."""
    with file.open("rb") as stream:
        return 8 + int.from_bytes(stream.read(8), "little")
