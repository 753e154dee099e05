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


class Journal:
    """The journal of `<out>.partial`, locked while it is open. `done`: {(file number, byte offset): CRC-32}."""

    def __init__(self, directory: Path, descriptor: int) -> None:
        self._file = directory / NAME
        self._descriptor = descriptor
        self.done: dict[tuple[int, int], int] = {}

    @classmethod
    def open(cls, directory: Path) -> Journal:
        """The journal of a directory, made where missing. Raises ConversionError (9) while another process has it open."""
        descriptor = os.open(directory / NAME, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ConversionError(
                f"{directory}: another conversion is writing there; wait for it or choose another OUT.",
                ExitCode.OUTPUT_EXISTS,
            ) from None
        return cls(directory, descriptor)

    def resume(self, key: dict[str, Any]) -> None:
        """Reads what was done. Raises ConversionError (9) unless it belongs to the conversion that `key` describes."""
        lines = self._file.read_text(errors="replace").split("\n")
        if len(lines) == 1:  # killed before the first line was whole
            self.begin(key)
            return
        try:
            found = json.loads(lines[0])
        except ValueError:
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
            if len(words) == 3 and all(word.isdigit() for word in words):
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

    def remove(self) -> None:
        """Deletes the file; the lock stays until `close`."""
        self._file.unlink()

    def close(self) -> None:
        """Removes the lock; the file stays."""
        os.close(self._descriptor)
