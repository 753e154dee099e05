"""Records of a .jsonl file of any size: a memory map, and where each record lies.

`<file>.offsets` of a large file is made once and mapped by every process: a line of JSON that
describes the file, then ENTRY after ENTRY. Of a small one, or where that cannot be written, the
entries stay in memory. A record ends at a newline byte and nowhere else; blank lines do not count.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import mmap
from array import array
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from rlflow.errors import DataError
from rlflow.storage.files import replacing
from rlflow_environments.common.jsonl import BadRow, existing, records, refuse
from rlflow_environments.common.text import load_json

logger = logging.getLogger(__name__)

PARTIAL, WHOLE, EMPTY = range(3)
"""A record is sent to clients as it stands if it is whole, else completed, and never if empty."""
ENTRY = np.dtype([("start", "<u8"), ("length", "<u8"), ("kind", "u1")])
ShareProgress = Callable[[float], None]
"""Called with the share that is done, from 0 to 1."""
KEPT_FROM = 64 << 20  # bytes of a file: a smaller one is gone through in a second
_FORMAT = 5
_LONGEST_HEADER = 1024
_REPORT_EVERY = 1 << 16


class Records:
    """The records of one file, without surrounding blanks and byte order mark."""

    def __init__(
        self,
        path: str | Path,
        what: str,
        kind_of: Callable[[bytes, int], int],
        progress: ShareProgress = lambda share: None,
    ) -> None:
        """kind_of: (record, its row) -> PARTIAL, WHOLE or EMPTY; raises BadRow. It is called once
        per record of a file, not again at the next start. Raises DataError: no such file, no record
        with text, bad records (all are counted)."""
        self.path = existing(path, what)
        self._what, self._kind_of = what, kind_of
        self._offsets = self.path.with_name(f"{self.path.name}.offsets")
        status = self.path.stat()
        self._data: mmap.mmap | bytes = b""  # an empty file cannot be mapped
        if status.st_size:
            with self.path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with self.path.open("rb") as turn:  # of processes that start together one makes them
            with suppress(OSError):  # not every file system has locks
                fcntl.flock(turn, fcntl.LOCK_EX)
            sample = sample_digest(self.path)
            stamp = {"bytes": status.st_size, "modified_ns": status.st_mtime_ns, "sample": sample}
            stamp["format"] = _FORMAT
            self._keeps = status.st_size >= KEPT_FROM
            self._entries, self.sha256 = self._kept(stamp) or self._made(stamp, progress)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, row: int) -> tuple[bytes, int]:
        start, length, kind = self._entries[row].item()
        return self._data[start : start + length], kind

    def rows_of(self, kind: int) -> frozenset[int]:
        return frozenset(np.flatnonzero(self._entries["kind"] == kind).tolist())

    def _kept(self, stamp: dict[str, Any]) -> tuple[np.ndarray, str] | None:
        """(entries, SHA-256 of the file) as written beside the file in its present state."""
        if not self._keeps:
            return None
        try:
            with self._offsets.open("rb") as file:
                line = file.readline(_LONGEST_HEADER)
            header = json.loads(line)
            # As a plain array: every access to an np.memmap makes another one, which is slow.
            entries = np.memmap(self._offsets, ENTRY, "r", len(line)).view(np.ndarray)
            same = stamp.items() <= header.items()
            if same and header["entries"] == hashlib.sha256(entries).hexdigest():
                return entries, header["sha256"]
        except (OSError, ValueError, AttributeError, KeyError):
            pass  # none, or of something else
        return None

    def _made(self, stamp: dict[str, Any], progress: ShareProgress) -> tuple[np.ndarray, str]:
        starts, lengths, kinds = array("Q"), array("Q"), bytearray()
        bad: list[tuple[str, str]] = []
        for line, start, text in records(self._data):
            record = (text if start else text.removeprefix(b"\xef\xbb\xbf")).strip()
            try:
                kinds.append(self._kind_of(record, len(kinds)))
            except BadRow as problem:
                bad.append((f"line {line}", str(problem)))
                continue
            starts.append(start + text.index(record))
            lengths.append(len(record))
            if not len(kinds) % _REPORT_EVERY:
                progress(start / len(self._data))
        if bad and self._data[:2] == b"\x1f\x8b":
            raise DataError(
                f"{self.path}: expected the {self._what} as JSON Lines, found gzip. Unpack it: "
                f"gunzip -k {self.path}."
            )
        empty = kinds.count(EMPTY)
        refuse(self.path, self._what, bad, len(kinds) - empty, empty=empty)
        entries = np.empty(len(kinds), ENTRY)
        entries["start"], entries["length"], entries["kind"] = starts, lengths, kinds
        sha256 = hashlib.sha256(self._data).hexdigest()
        if not self._keeps:
            return entries, sha256
        header = {**stamp, "sha256": sha256, "entries": hashlib.sha256(entries).hexdigest()}
        try:
            with replacing(self._offsets, durable=False) as aside, aside.open("wb") as file:
                file.write(json.dumps(header).encode() + b"\n")
                entries.tofile(file)
        except OSError as problem:
            told = "%s cannot be written (%s): the offsets are made again at every start"
            logger.warning(told, self._offsets, problem)
        return self._kept(stamp) or (entries, sha256)


def dump_json(value: Any) -> bytes:
    """JSON in UTF-8; lone surrogates, which UTF-8 cannot hold, are escaped."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value).encode()


def load_record(record: bytes) -> Any:
    """What Python's reader takes: also NaN and lone surrogates (as U+FFFD), which orjson refuses.
    Raises ValueError, RecursionError."""
    try:
        return orjson.loads(record)
    except orjson.JSONDecodeError:
        return load_json(record)


SAMPLES = 32
_SAMPLE_BYTES = 1 << 15


def sample_digest(path: Path) -> str:
    """SHA-256 of the file's size and of SAMPLES pieces spread over it, first and last included."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    last = max(0, size - _SAMPLE_BYTES)
    with path.open("rb") as file:
        for number in range(SAMPLES):
            file.seek(last * number // (SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of every byte."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stamp_file(path: Path) -> dict[str, Any]:
    """{bytes, sha256, sample} of a file."""
    size = path.stat().st_size
    return {"bytes": size, "sha256": file_digest(path), "sample": sample_digest(path)}
