"""Files that are written from beginning to end, several at a time, each with its checksum."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.errors import ConversionError
from rlflow.storage.integrity import Fingerprint, Hasher, fingerprint

from ..mapping.plan import Target
from ..problems import damaged
from ..stream import Copier, OtherFailed


class HashedFile(io.BufferedWriter):
    """A file that is written from beginning to end."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(io.FileIO(path, "wb"))
        self.path = path
        self._hasher = Hasher()

    def write(self, data: Any) -> int:
        """Appends bytes. Raises OSError."""
        self._hasher.update(data)
        return super().write(data)

    def finish(self, read_back: bool) -> Fingerprint:
        """Brings the file to the disk. Raises OSError, and ConversionError (4) where it reads back
        differently."""
        self.flush()
        os.fsync(self.fileno())
        written = self._hasher.fingerprint()
        if read_back:
            # Read back from the disk, as far as the system heeds the advice, not from its cache.
            os.posix_fadvise(self.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if fingerprint(self.path) != written:
                raise reads_back_differently(self.path)
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
        with HashedFile(directory / file.name) as opened:
            file.write(opened, copier)
            return opened.finish(read_back)

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
