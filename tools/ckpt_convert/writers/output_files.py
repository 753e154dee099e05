"""Where a conversion writes: preallocated files whose layout is known before the first byte is copied.

A file is a list of targets at byte offsets, and the literal bytes between them (headers, tables). Blocks of targets may
be written in any order and from any thread; their checksums add up to that of the file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlflow.errors import ConversionError, ExitCode
from rlflow.models.huggingface import INDEX_FILE, SINGLE_FILE

from ..mapping.plan import Target
from . import checksum
from .direct import DirectFile, PageBuffer
from .journal import Journal

BLOCK_BYTES = 4 << 20
"""Of output per block. A worker holds up to three times as much."""
Literals = Sequence[tuple[int, bytes]]


@dataclass(frozen=True)
class OutputFile:
    """A file of the output. places: (target, first byte). literals: (first byte, bytes) of everything else.

    name may contain folders. seal: further literals, from {name of a target: CRC-32 of its bytes}, for formats whose
    headers hold checksums. What neither targets nor literals cover is zero."""

    name: str
    size: int
    places: tuple[tuple[Target, int], ...]
    literals: tuple[tuple[int, bytes], ...] = ()
    seal: Callable[[Mapping[str, int]], Literals] | None = None


@dataclass(frozen=True)
class RowBlock:
    """Rows [first, last) of a target, at a byte offset of the file with that number."""

    file: int
    offset: int
    target: Target
    first: int
    last: int

    @property
    def size(self) -> int:
        return (self.last - self.first) * self.target.row_bytes


def safetensors_files(targets: Sequence[Target], shard_bytes: int) -> list[OutputFile]:
    """A model directory's weights: files with at most `shard_bytes` of tensors, more only where one tensor alone has
    more; with an index if there are several."""
    groups: list[list[Target]] = [[]]
    filled = 0
    for target in targets:
        if groups[-1] and filled + target.nbytes > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(target)
        filled += target.nbytes
    if len(groups) == 1:
        return [_safetensors(SINGLE_FILE, groups[0])]
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    weight_map = {target.name: name for name, group in zip(names, groups) for target in group}
    total = sum(target.nbytes for target in targets)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    text = (json.dumps(index, indent=2) + "\n").encode()
    files = [_safetensors(name, group) for name, group in zip(names, groups)]
    return [*files, OutputFile(INDEX_FILE, len(text), (), ((0, text),))]


def _safetensors(name: str, targets: Sequence[Target]) -> OutputFile:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at, starts = 0, []
    for target in targets:
        starts.append(at)
        entries[target.name] = {
            "dtype": target.dtype.safetensors,
            "shape": list(target.shape),
            "data_offsets": [at, at + target.nbytes],
        }
        at += target.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    places = tuple((target, len(header) + start) for target, start in zip(targets, starts))
    return OutputFile(name, len(header) + at, places, ((0, header),))


def layout_digest(files: Sequence[OutputFile]) -> str:
    """A hash of where every block and every literal lies: conversions that agree in it may continue each other."""
    content = hashlib.sha256(f"{BLOCK_BYTES}\n".encode())
    for file in files:
        content.update(f"{file.name}|{file.size}|{[start for _, start in file.places]}\n".encode())
        content.update(b"".join(data for _, data in file.literals))
    return content.hexdigest()


class OutputFiles:
    """The open files of one conversion, in a directory of its own. `written`: {(file number, offset): CRC-32}."""

    def __init__(self, directory: Path, files: Sequence[OutputFile], journal: Journal, read_back: bool = True) -> None:
        """Preallocates, so that a disk without room is known before anything is copied. read_back: whether each block is
        read again once it is written. Raises ConversionError (8) or OSError."""
        self.directory = directory
        self.files = files
        self.written: dict[tuple[int, int], int] = {}
        self._journal, self._read_back = journal, read_back
        self._opened: list[DirectFile] = []
        self._literals: list[list[tuple[int, bytes]]] = [list(file.literals) for file in files]
        self._needed = sum(file.size for file in files)
        try:
            self._check_room()
            for file in files:
                self._preallocate(file)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> OutputFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        while self._opened:
            self._opened.pop().close()

    def blocks(self) -> Iterator[RowBlock]:
        """All blocks, in file order."""
        for number, file in enumerate(self.files):
            for target, start in file.places:
                yield from row_blocks(number, target, start)

    def unwritten(self, workers: int) -> list[RowBlock]:
        """The blocks that are not yet written; those that the journal has are read again and must be what it says."""
        blocks = list(self.blocks())
        noted = [block for block in blocks if (block.file, block.offset) in self._journal.done]
        with ThreadPoolExecutor(workers) as pool:
            for block, found in self._read(noted, pool, workers):
                if found == self._journal.done[block.file, block.offset]:
                    self.written[block.file, block.offset] = found
        return [block for block in blocks if (block.file, block.offset) not in self.written]

    def write(self, block: RowBlock, data: np.ndarray) -> None:
        """Writes a block, whose bytes lie in a `PageBuffer` at its offset and are destroyed. Safe to call from several
        threads. Raises OSError, and ConversionError (4) where it reads back otherwise."""
        self._opened[block.file].write(data.data, block.offset)
        found = checksum.crc32(data)
        if self._read_back:
            self._check(block, data, found)
        self.written[block.file, block.offset] = found
        self._journal.record(block.file, block.offset, found)

    def finish(self) -> dict[str, int]:
        """Writes what depends on checksums, brings all to the disk, and returns {file: CRC-32}. Raises OSError."""
        checksums = self._of_targets() if any(file.seal for file in self.files) else {}
        for number, file in enumerate(self.files):
            self._literals[number] += file.seal(checksums) if file.seal else ()
            for offset, data in self._literals[number]:
                write_all(self._opened[number].descriptor, data, offset)
        for opened in self._opened:
            os.fsync(opened.descriptor)
        return {file.name: self._of_file(number) for number, file in enumerate(self.files)}

    def _check_room(self) -> None:
        there = sum(
            (self.directory / file.name).stat().st_blocks * 512
            for file in self.files
            if (self.directory / file.name).is_file()
        )
        free = shutil.disk_usage(self.directory).free
        if free + there < self._needed:
            raise ConversionError(
                f"{self.directory.parent}: {self._needed / 1e9:.2f} GB needed, {(free + there) / 1e9:.2f} GB free; make "
                "room or choose another disk.",
                ExitCode.DISK_FULL,
            )

    def _preallocate(self, file: OutputFile) -> None:
        path = self.directory / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        self._opened.append(DirectFile(path))
        descriptor = self._opened[-1].descriptor
        if os.fstat(descriptor).st_size > file.size:
            os.ftruncate(descriptor, file.size)
        if file.size:
            os.posix_fallocate(descriptor, 0, file.size)
        for offset, data in file.literals:
            write_all(descriptor, data, offset)

    def _read(
        self, blocks: Sequence[RowBlock], pool: ThreadPoolExecutor, workers: int
    ) -> Iterator[tuple[RowBlock, int]]:
        """(block, CRC-32 of what the file has there), read by `workers` threads of a pool."""
        shares = [blocks[number::workers] for number in range(workers)]
        for share, found in zip(shares, pool.map(self._checksums, shares)):
            yield from zip(share, found)

    def _checksums(self, blocks: Sequence[RowBlock]) -> list[int]:
        buffer, found = PageBuffer(largest(blocks)), []
        for block in blocks:
            data = buffer.at(block.offset, block.size)
            count = self._opened[block.file].read(data.data, block.offset)
            found.append(checksum.crc32(data[:count]))
        return found

    def _check(self, block: RowBlock, data: np.ndarray, written: int) -> None:
        """Reads a block into the place that it was written from. Raises ConversionError (4) where its CRC-32 is another."""
        count = self._opened[block.file].read(data.data, block.offset)
        if checksum.crc32(data[:count]) != written:
            raise ConversionError(
                f"{self.directory / self.files[block.file].name}: '{block.target.name}' reads back differently than it "
                "was written; the disk or the memory is faulty.",
                ExitCode.DAMAGED,
            )

    def _of_targets(self) -> dict[str, int]:
        parts: dict[str, list[tuple[int, int]]] = {}
        for block in self.blocks():
            parts.setdefault(block.target.name, []).append((self.written[block.file, block.offset], block.size))
        return {name: checksum.combine(found) for name, found in parts.items()}

    def _of_file(self, number: int) -> int:
        """The CRC-32 of a file, from those of its blocks and literals."""
        parts = [(offset, zlib.crc32(data), len(data)) for offset, data in self._literals[number]]
        for target, start in self.files[number].places:
            blocks = row_blocks(number, target, start)
            parts += [(block.offset, self.written[block.file, block.offset], block.size) for block in blocks]
        joined, at = [], 0
        for offset, found, length in [*sorted(parts), (self.files[number].size, 0, 0)]:
            joined += [(checksum.crc32_of_zeros(offset - at), offset - at), (found, length)]
            at = offset + length
        return checksum.combine(joined)


def largest(blocks: Sequence[RowBlock]) -> int:
    """Bytes of the largest block."""
    return max((block.size for block in blocks), default=0)


def row_blocks(file: int, target: Target, start: int) -> Iterator[RowBlock]:
    """The blocks of a target that begins at byte `start` of a file."""
    rows = max(1, BLOCK_BYTES // target.row_bytes)
    for first in range(0, target.rows, rows):
        yield RowBlock(file, start + first * target.row_bytes, target, first, min(first + rows, target.rows))


def write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Writes all of `data` at an offset; pwrite may write less than it is asked to."""
    left = memoryview(data).cast("B")
    while left:
        count = os.pwrite(descriptor, left, offset)
        left, offset = left[count:], offset + count
