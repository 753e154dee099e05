"""Copying planned tensors into preallocated safetensors shards, block by block, from several threads."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlflow.errors import ConversionError, ExitCode
from rlflow.weights.hf import INDEX_FILE, SINGLE_FILE
from rlflow.weights.plan import Plan, Target
from rlflow.weights.torch_dist import Content, Item, TorchDist

BLOCK_BYTES = 8 << 20
"""Of output per block; a worker holds about three times as much."""
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
"""Of dtypes in a safetensors header."""
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Shard:
    """A file of the output: its header, and where in the file each target's bytes begin."""

    file: str
    header: bytes
    targets: tuple[tuple[Target, int], ...]
    size: int


@dataclass(frozen=True)
class Block:
    """Rows [first, last) of a target, at a byte offset of a file."""

    file: str
    offset: int
    target: Target
    first: int
    last: int

    @property
    def size(self) -> int:
        return (self.last - self.first) * self.target.row_bytes


def layout(plan: Plan, shard_bytes: int) -> list[Shard]:
    """The output's files, none with more than `shard_bytes` of tensors unless one tensor alone has more."""
    groups: list[list[Target]] = [[]]
    filled = 0
    for target in plan.targets:
        if groups[-1] and filled + target.nbytes > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(target)
        filled += target.nbytes
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    return [_shard(name, group) for name, group in zip([SINGLE_FILE] if len(groups) == 1 else names, groups)]


def _shard(file: str, targets: Sequence[Target]) -> Shard:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at, starts = 0, []
    for target in targets:
        starts.append(at)
        entries[target.name] = {
            "dtype": NAMES[target.dtype],
            "shape": list(target.shape),
            "data_offsets": [at, at + target.nbytes],
        }
        at += target.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    return Shard(
        file, header, tuple((one, len(header) + start) for one, start in zip(targets, starts)), len(header) + at
    )


def blocks_of(shards: Sequence[Shard]) -> Iterator[Block]:
    """All blocks in file order."""
    for shard in shards:
        for target, start in shard.targets:
            rows = max(1, BLOCK_BYTES // target.row_bytes)
            for first in range(0, target.shape[0], rows):
                last = min(first + rows, target.shape[0])
                yield Block(shard.file, start + first * target.row_bytes, target, first, last)


def write_shards(
    checkpoint: TorchDist, plan: Plan, shards: Sequence[Shard], directory: Path, workers: int, progress: Progress
) -> dict[tuple[str, int], int]:
    """Writes the files and the index into `directory`, synced to the disk; returns {(file, offset): crc32 of a block}.

    Raises ConversionError for a full disk (8), a damaged source (4), and NaN or Inf in the weights (4)."""
    free, needed = shutil.disk_usage(directory).free, sum(shard.size for shard in shards)
    if free < needed:
        raise ConversionError(
            f"{directory.parent}: {needed / 1e9:.2f} GB needed, {free / 1e9:.2f} GB free; make room or choose another disk.",
            ExitCode.DISK_FULL,
        )
    files: dict[str, int] = {}
    try:
        for shard in shards:
            files[shard.file] = os.open(directory / shard.file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            os.posix_fallocate(files[shard.file], 0, shard.size)
            _write_all(files[shard.file], shard.header, 0)
        checksums = _copy(_Reader(checkpoint), list(blocks_of(shards)), files, workers, progress)
        for descriptor in files.values():
            os.fsync(descriptor)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise ConversionError(
            f"{directory}: cannot be written ({error.strerror}); {needed / 1e9:.2f} GB are needed.",
            ExitCode.DISK_FULL if full else ExitCode.DAMAGED,
        ) from error
    finally:
        for descriptor in files.values():
            os.close(descriptor)
    if len(shards) > 1:
        weight_map = {target.name: shard.file for shard in shards for target, _ in shard.targets}
        content = {"metadata": {"total_size": plan.nbytes}, "weight_map": dict(sorted(weight_map.items()))}
        (directory / INDEX_FILE).write_text(json.dumps(content, indent=2) + "\n")
    return checksums


def _copy(
    reader: _Reader, blocks: Sequence[Block], files: dict[str, int], workers: int, progress: Progress
) -> dict[tuple[str, int], int]:
    def copy(block: Block) -> tuple[Block, int]:
        content = reader.rows(block.target, block.first, block.last)
        if not torch.isfinite(content).all():
            raise ConversionError(
                f"{reader.path}: '{block.target.source.stored.name}' holds NaN or Inf as {content.dtype} "
                f"(rows {block.first} to {block.last} of {block.target.name}).",
                ExitCode.DAMAGED,
            )
        data = content.view(-1).view(torch.uint8).numpy().data
        _write_all(files[block.file], data, block.offset)
        return block, zlib.crc32(data)

    checksums = {}
    with ThreadPoolExecutor(max_workers=workers) as pool:
        pending: set[Future[tuple[Block, int]]] = set()
        waiting = iter(blocks)
        try:
            while True:
                for block in waiting:
                    pending.add(pool.submit(copy, block))
                    if len(pending) >= 2 * workers:
                        break
                if not pending:
                    return checksums
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    block, checksum = future.result()
                    checksums[block.file, block.offset] = checksum
                    progress(block.size)
        finally:
            for future in pending:
                future.cancel()


class _Reader:
    """Rows of targets, gathered from a checkpoint's chunks. Safe to use from several threads."""

    def __init__(self, checkpoint: TorchDist) -> None:
        self.path = checkpoint.path
        self._checkpoint = checkpoint
        self._lock = threading.Lock()
        self._contents: dict[Item, Content] = {}
        self._files: dict[str, int] = {}

    def __del__(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)

    def rows(self, target: Target, first: int, last: int) -> Tensor:
        """Rows [first, last) of a target in its dtype: (rows, columns)."""
        stored = target.source.stored
        columns = math.prod(target.shape[1:])
        block = torch.empty(last - first, columns, dtype=stored.dtype)
        pieces = list(target.source.pieces())
        for start, origin, rows in target.segments:
            begin, end = max(first, start), min(last, start + rows)
            if begin < end:
                self._gather(block[begin - first : end - first], pieces, origin + begin - start, target)
        return block.to(target.dtype)

    def _gather(self, out: Tensor, pieces: Sequence[tuple], row: int, target: Target) -> None:
        """Fills `out`, rows `row` and following of the source, from the pieces that hold parts of them."""
        stored = target.source.stored
        for item, skipped, offsets, sizes in pieces:
            begin, end = max(row, offsets[0]), min(row + out.shape[0], offsets[0] + sizes[0])
            if begin >= end:
                continue
            width = math.prod(sizes[1:])
            column = offsets[1] if len(offsets) > 1 else 0
            place = out[begin - row : end - row]
            whole = width == out.shape[1]
            part = place if whole else torch.empty(end - begin, width, dtype=stored.dtype)
            descriptor, content = self._open(target, item)
            start = content.start + (skipped + (begin - offsets[0]) * width) * stored.dtype.itemsize
            _read_all(descriptor, part, start, self.path / item.file)
            if not whole:
                place[:, column : column + width] = part

    def _open(self, target: Target, item: Item) -> tuple[int, Content]:
        with self._lock:
            if item not in self._contents:
                self._contents[item] = self._checkpoint.content(target.source.stored, item)
            if item.file not in self._files:
                self._files[item.file] = os.open(self.path / item.file, os.O_RDONLY)
            return self._files[item.file], self._contents[item]


def _read_all(descriptor: int, out: Tensor, offset: int, file: Path) -> None:
    data = memoryview(out.view(-1).view(torch.uint8).numpy()).cast("B")
    done = 0
    while done < len(data):
        count = os.preadv(descriptor, [data[done:]], offset + done)
        if count == 0:
            raise ConversionError(f"{file}: ends at byte {offset + done}; it shrank while being read.", ExitCode.DAMAGED)
        done += count


def _write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    left = memoryview(data).cast("B")
    while left:
        count = os.pwrite(descriptor, left, offset)
        left, offset = left[count:], offset + count
