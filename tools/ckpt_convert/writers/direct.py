"""Blocks of a file past the page cache (open(2), O_DIRECT), where the file system can: filling the cache with what nobody
reads costs more processor time than all else in a conversion, and what is read back comes from the disk.

Such transfers are of whole pages, from memory that lies on page boundaries too. The bytes of a block before its first and
after its last page boundary, pages that it shares with its neighbours, go through the cache."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

PAGE = 4096
LEAST_BYTES = 1 << 16
"""Blocks below this go through the cache."""


class PageBuffer:
    """Memory for one block of at most `size` bytes at a time."""

    def __init__(self, size: int) -> None:
        self._memory = np.frombuffer(mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)

    def at(self, offset: int, size: int) -> np.ndarray:
        """`size` bytes that lie within a page as byte `offset` of a file does."""
        return self._memory[offset % PAGE : offset % PAGE + size]


class DirectFile:
    """A file open for reading and writing, through the cache (`descriptor`) and, where that is possible, past it."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        self._direct: int | None = None
        with contextlib.suppress(OSError):  # a file system without it
            self._direct = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_NOFOLLOW)

    def close(self) -> None:
        os.close(self.descriptor)
        if self._direct is not None:
            os.close(self._direct)

    def write(self, data: memoryview, offset: int) -> None:
        """Writes all of `data`, which lies in a `PageBuffer` at `offset`. Raises OSError."""
        for descriptor, first, last in self._parts(offset, len(data)):
            self._transfer(os.pwrite, descriptor, data[first:last], offset + first)

    def read(self, data: memoryview, offset: int) -> int:
        """Fills `data`, which lies in a `PageBuffer` at `offset`, and returns how many bytes there were. Raises OSError."""
        return sum(
            self._transfer(lambda file, part, at: os.preadv(file, [part], at), descriptor, data[first:last], offset + first)
            for descriptor, first, last in self._parts(offset, len(data))
        )

    def _parts(self, offset: int, size: int) -> Iterator[tuple[int, int, int]]:
        """(descriptor, first, last) of the pieces of a block."""
        first, last = -offset % PAGE, size - (offset + size) % PAGE
        if self._direct is None or size < LEAST_BYTES:
            yield self.descriptor, 0, size
            return
        pieces = ((self.descriptor, 0, first), (self._direct, first, last), (self.descriptor, last, size))
        yield from (piece for piece in pieces if piece[1] < piece[2])

    def _transfer(
        self, call: Callable[[int, memoryview, int], int], descriptor: int, data: memoryview, offset: int
    ) -> int:
        """Calls until all of `data` is done, or nothing is left to read; returns the bytes done."""
        done = 0
        while done < len(data):
            try:
                count = call(descriptor, data[done:], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or descriptor == self.descriptor:
                    raise
                descriptor = self.descriptor  # a file system that opens files so, but has other pages
                continue
            if count == 0:
                break
            done += count
            if done % PAGE:  # cut short within a page, from where only the cache goes on
                descriptor = self.descriptor
        return done
