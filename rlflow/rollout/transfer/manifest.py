"""What a version of the weights consists of: where each tensor lies in one stretch of bytes, and
its hashes."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlflow.errors import RolloutError
from rlflow.rollout.transfer.hashes import PACKAGES, hash_of

ALIGNMENT = 64  # bytes: a tensor begins at a multiple, zeros lie between
MOST_DIMENSIONS = 16
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
                  torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)
}  # fmt: skip
HASH = re.compile(r"[0-9a-f]{32,64}")


@dataclass(frozen=True)
class PublishedTensor:
    """start: its first byte. hashes: of its parts of `Manifest.part_bytes` bytes, the last one
    shorter."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    hashes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Manifest:
    """A version. size: bytes from the first tensor to the end of the last. hash: the function's
    name."""

    version: int
    size: int
    part_bytes: int
    hash: str
    tensors: tuple[PublishedTensor, ...]

    @property
    def digest(self) -> str:
        """Of names, dtypes, shapes and contents, not of the version: 64 hex digits."""
        lines = (
            f"{item.name}|{item.dtype}|{item.shape}|{','.join(item.hashes)}"
            for item in self.tensors
        )
        return hashlib.sha256(
            "\n".join([f"{self.hash}|{self.part_bytes}", *lines]).encode()
        ).hexdigest()

    @property
    def layout(self) -> str:
        """Of names, dtypes, shapes and places: 64 hex digits. Only between versions of one layout
        is there a delta."""
        lines = (f"{item.name}|{item.dtype}|{item.shape}|{item.start}" for item in self.tensors)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(item.nbytes for item in self.tensors)

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()


def decode_manifest(content: bytes, where: str) -> Manifest:
    """The manifest in bytes from elsewhere. Raises RolloutError unless every number in it holds."""
    try:
        fields: dict[str, Any] = json.loads(content)
        tensors = tuple(_tensor(item) for item in fields.pop("tensors"))
        manifest = Manifest(**fields, tensors=tensors)
        _check(manifest)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise RolloutError(
            f"weight transfer: {where}: expected the manifest of a version, found none ({reason})."
        ) from None
    return manifest


def parts(total: int, part_bytes: int) -> Iterator[tuple[int, int]]:
    """(start, end) of the parts of a stretch of `total` bytes."""
    return ((start, min(start + part_bytes, total)) for start in range(0, total, part_bytes))


def aligned(place: int) -> int:
    """The next place that a tensor may begin at."""
    return -(-place // ALIGNMENT) * ALIGNMENT


def content_of(tensor: Tensor) -> np.ndarray:
    """The bytes of a tensor, (N,) uint8, on the CPU; no copy where they lie there in order."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def as_tensor(item: PublishedTensor, content: np.ndarray) -> Tensor:
    """The tensor whose bytes these are, sharing them."""
    if not len(content):
        return torch.empty(item.shape, dtype=DTYPES[item.dtype])
    return torch.from_numpy(content).view(DTYPES[item.dtype]).view(item.shape)


def verify(
    item: PublishedTensor, number: int, content: np.ndarray, manifest: Manifest, where: str
) -> None:
    """Raises RolloutError unless the bytes of part `number` of a tensor hash to what was
    published."""
    compare(item, number, hash_of(manifest.hash, content), manifest, where)


def compare(item: PublishedTensor, number: int, found: str, manifest: Manifest, where: str) -> None:
    """As `verify`, with the hash that was found."""
    if found != item.hashes[number]:
        raise RolloutError(
            f"weight transfer: {where}: part {number} of '{item.name}' of version {manifest.version} hashes ({manifest.hash}) to "
            f"{found[:12]}, {item.hashes[number][:12]} was published; it was damaged on its way. Read it again."
        )


def _tensor(fields: dict[str, Any]) -> PublishedTensor:
    shape, hashes = fields.pop("shape"), fields.pop("hashes")
    item = PublishedTensor(**fields, shape=tuple(shape), hashes=tuple(hashes))
    whole = (item.start, *item.shape)
    if (
        not isinstance(item.name, str)
        or item.dtype not in DTYPES
        or len(item.shape) > MOST_DIMENSIONS
    ):
        raise ValueError(f"tensor {item.name!r}: {item.dtype!r}, {len(item.shape)} dimensions")
    if not all(type(number) is int and number >= 0 for number in whole):
        raise ValueError(f"tensor '{item.name}': shape and start {whole}")
    if not all(isinstance(text, str) and HASH.fullmatch(text) for text in item.hashes):
        raise ValueError(f"tensor '{item.name}': no hashes")
    return item


def _check(manifest: Manifest) -> None:
    """Raises ValueError unless tensors follow one another without overlap, and each has the hashes
    of all of its parts."""
    if not all(
        type(number) is int for number in (manifest.version, manifest.size, manifest.part_bytes)
    ):
        raise ValueError("version, size and part_bytes are no whole numbers")
    if manifest.part_bytes < 1 or manifest.hash not in (*PACKAGES, "sha256"):
        raise ValueError(f"parts of {manifest.part_bytes} bytes, hashes {manifest.hash!r}")
    end = 0
    for item in manifest.tensors:
        if item.start < end or item.start != aligned(item.start):
            raise ValueError(f"tensor '{item.name}' begins at {item.start}")
        end = item.start + item.nbytes
        if len(item.hashes) != -(-item.nbytes // manifest.part_bytes):
            raise ValueError(f"tensor '{item.name}' has {len(item.hashes)} hashes")
    if manifest.size != end:
        raise ValueError(f"the tensors end at {end}, not at {manifest.size}")
    if len({item.name for item in manifest.tensors}) != len(manifest.tensors):
        raise ValueError("a tensor is listed twice")
