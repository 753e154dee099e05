"""What a conversion has done so far, on the disk, so that `--resume` continues it after `kill -9`.

The first line says to what the rest belongs: source, plan and layout of the files. Each further line is a block that
has been written, with its checksum; on resuming every such block is read again, so that what a power cut took is done
once more. A last line that was cut short counts for nothing."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from rlflow.errors import ConversionError, ExitCode

NAME = "conversion.journal"
KEYS = {"source", "plan", "files"}
"""What the first line of every journal has."""
LONGEST_LINE = 64 << 20


class Journal:
    """The journal of `<out>.partial`, which is locked while it is open, also under its final name. `done`: {(file number,
    byte offset): CRC-32}."""

    def __init__(self, directory: Path, lock: int, descriptor: int) -> None:
        self._file = directory / NAME
        self._lock, self._descriptor = lock, descriptor
        self.done: dict[tuple[int, int], int] = {}

    @classmethod
    def open(cls, directory: Path) -> Journal:
        """The journal of a directory, both made where missing. Raises ConversionError (9) while another process has it
        open, and for a directory that no conversion made."""
        directory.mkdir(parents=True, exist_ok=True)
        if directory.is_symlink():
            raise _not_ours(directory, "is a symbolic link")
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _same_place(directory, lock):  # it got its final name since it was opened
                raise BlockingIOError
            if not _made_here(directory):
                raise _not_ours(directory, f"holds files, but no {NAME} of a conversion")
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            return cls(directory, lock, os.open(directory / NAME, flags, 0o644))
        except (BlockingIOError, FileNotFoundError):
            os.close(lock)
            raise ConversionError(
                f"{directory}: another conversion is writing there; wait for it or choose another OUT.",
                ExitCode.OUTPUT_EXISTS,
            ) from None
        except BaseException:
            os.close(lock)
            raise

    def resume(self, key: dict[str, Any]) -> None:
        """Reads what was done. Raises ConversionError (9) unless it belongs to the conversion that `key` describes."""
        lines = self._file.read_text(errors="replace").split("\n")
        if len(lines) == 1:  # killed before the first line was whole
            self.begin(key)
            return
        try:
            found = json.loads(lines[0])
        except (ValueError, RecursionError):
            found = {}
        differing = [name for name in key if found.get(name) != key[name]]
        if differing:
            raise ConversionError(
                f"{self._file.parent}: is of another conversion ({', '.join(differing)} differs), so --resume does not "
                "continue it; leave --resume out to begin again, or choose another OUT.",
                ExitCode.OUTPUT_EXISTS,
            )
        for line in lines[1:-1]:  # what follows the last line break was cut short
            words = line.split()
            if len(words) == 3 and all(word.isascii() and word.isdigit() for word in words):
                self.done[int(words[0]), int(words[1])] = int(words[2])
        os.write(self._descriptor, b"\n")

    def begin(self, key: dict[str, Any]) -> None:
        """Starts from nothing."""
        self.done.clear()
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, json.dumps(key).encode() + b"\n")

    def record(self, file: int, offset: int, checksum: int) -> None:
        """Notes a block that has been written; one write to the end of the file, whole whatever thread calls."""
        os.write(self._descriptor, f"{file} {offset} {checksum}\n".encode())

    def is_of(self, directory: Path) -> bool:
        """Whether the locked directory is still under this name."""
        return _same_place(directory, self._lock)

    def close(self) -> None:
        """Removes the lock; the file stays."""
        os.close(self._descriptor)
        os.close(self._lock)


def _same_place(path: Path, descriptor: int) -> bool:
    """Whether a path leads to an open directory."""
    try:
        there, opened = os.stat(path, follow_symlinks=False), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (opened.st_dev, opened.st_ino)


def _made_here(directory: Path) -> bool:
    """Whether a directory is empty or has the journal of a conversion."""
    journal = directory / NAME
    if journal.is_symlink():
        return False
    if {entry.name for entry in directory.iterdir()} <= {NAME}:  # killed before the first line was whole
        return True
    try:
        with journal.open("rb") as file:
            found = json.loads(file.readline(LONGEST_LINE))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.keys() >= KEYS


def _not_ours(directory: Path, why: str) -> ConversionError:
    return ConversionError(
        f"{directory}: {why}, so it is left alone; move it away or choose another OUT.", ExitCode.OUTPUT_EXISTS
    )
