"""Files that are written from beginning to end, several at a time, each with its checksum."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rlflow.errors import ConversionError
from rlflow.storage.integrity import Fingerprint, Hasher, fingerprint

from ..mapping.plan import Target
from ..problems import damaged
from ..stream import Copier, OtherFailed

T = TypeVar("T")


class HashedFile:
    """A file that is being written, of which only the end can be changed."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.directory = path.parent
        self._path = path
        self._file = path.open("wb")
        self._hasher = Hasher()

    def write(self, data: Any) -> int:
        """Appends bytes. Raises OSError."""
        self._hasher.update(data)
        return self._file.write(data)

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def finish(self, read_back: bool) -> Fingerprint:
        """Brings the file to the disk. Raises OSError, and ConversionError (4) where it reads back
        differently."""
        self._file.flush()
        os.fsync(self._file.fileno())
        written = self._hasher.fingerprint()
        if read_back:
            # Read back from the disk, as far as the system heeds the advice, not from its cache.
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if fingerprint(self._path) != written:
                raise reads_back_differently(self._path)
        return written


def reads_back_differently(path: Path) -> ConversionError:
    """The error (4) for a file that is not what was written."""
    return damaged(
        f"{path}: reads back differently than it was written; the disk or the memory is faulty."
    )


@dataclass(frozen=True)
class OutputFile:
    """A file of the output. name: may contain folders. write: appends all of it to an open file,
    with the bytes of `targets` from the copier."""

    name: str
    targets: tuple[Target, ...]
    write: Callable[[HashedFile, Copier], None]


def write_files(
    directory: Path,
    files: Sequence[OutputFile],
    copier: Copier,
    workers: int,
    read_back: bool,
) -> dict[str, Fingerprint]:
    """Writes the files, `workers` at a time, and returns what they look like.

    Raises ConversionError (4) for a damaged source, NaN or Inf in the weights, and a file that
    reads back differently; OSError."""

    def work(file: OutputFile) -> Fingerprint:
        opened = HashedFile(directory / file.name)
        try:
            file.write(opened, copier)
            return opened.finish(read_back)
        finally:
            opened.close()

    with ThreadPoolExecutor(workers) as pool:
        running = [pool.submit(work, file) for file in files]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            copier.stop()
        failures = [error for task in running if (error := task.exception()) is not None]
        for error in failures:
            if not isinstance(error, OtherFailed):
                raise error
        return {file.name: task.result() for file, task in zip(files, running)}


def in_groups(items: Iterable[T], nbytes: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """The items in order, in groups of at most `most` bytes, or of one item that has more."""
    group: list[T] = []
    filled = 0
    for item in items:
        if group and filled + nbytes(item) > most:
            yield group
            group, filled = [], 0
        group.append(item)
        filled += nbytes(item)
    yield group
