"""Where the records of a .jsonl file of any size lie: made once, kept beside the file, mapped by
every process that reads it.

A record ends at a newline byte and nowhere else; blank lines do not count.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import mmap
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from rlflow.errors import DataError
from rlflow.storage.files import replacing
from rlflow_environments.common.jsonl import existing, records
from rlflow_environments.retrieval.indices.contents import sample_digest

logger = logging.getLogger(__name__)

ENTRY = np.dtype([("start", "<u8"), ("length", "<u4"), ("whole", "u1")])
"""Of one record: where it starts, its bytes without surrounding blanks, 1 if it can be sent to a
client as it is."""

Check = Callable[[bytes, int], bool | None]
"""(record, number of the row) -> whether it can be sent as it is; None where it has no text. Raises
DataError for a record that cannot be used."""
ShareProgress = Callable[[float], None]
"""Called with the share that is done, from 0 to 1."""

_MAGIC = b"rlflow offsets 4"
_HEADER = np.dtype(
    [
        ("magic", "S16"),
        ("size", "<u8"),
        ("modified", "<i8"),
        ("count", "<u8"),
        ("empty", "<u8"),
        ("sample", "S64"),
        ("sha256", "S64"),
        ("entries", "S64"),  # SHA-256 of what follows the header: 0.2 s for twenty million records
    ]
)
_ROW = np.dtype("<u8")  # after the entries: the rows without text
_BLOCK = 1 << 16  # entries gathered before they are written
_LONGEST = 2**32 - 1  # bytes
_HASHED = 1 << 24  # bytes at a time


def map_file(path: str | Path, what: str) -> tuple[Path, mmap.mmap]:
    """(path, its bytes, mapped). Raises DataError: no such file, or an empty one."""
    file = existing(path, what)
    if not file.stat().st_size:
        raise DataError(
            f"{file}: expected the {what}, one JSON object per line, found an empty file."
        )
    with file.open("rb") as opened:
        return file, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)


def map_offsets(
    path: Path, data: mmap.mmap, check: Check, progress: ShareProgress
) -> tuple[np.ndarray, np.ndarray, str]:
    """The entries of a file, (records,) of ENTRY, the rows without text, and its SHA-256: from
    `<file>.offsets` if that is of the file's present state, else made.

    They are written beside the file; where that is not possible they lie in an unnamed temporary
    file, mapped all the same."""
    status = path.stat()
    header = np.zeros(1, _HEADER)
    header["magic"], header["sample"] = _MAGIC, sample_digest(path).encode()
    header["size"], header["modified"] = status.st_size, status.st_mtime_ns
    kept = path.with_name(f"{path.name}.offsets")
    with path.open("rb") as turn:
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(turn, fcntl.LOCK_EX)  # of the processes that start together one makes them
        return _read(kept, header) or _make(kept, path, data, header, check, progress)


def _make(
    kept: Path,
    path: Path,
    data: mmap.mmap,
    header: np.ndarray,
    check: Check,
    progress: ShareProgress,
) -> tuple[np.ndarray, np.ndarray, str]:
    try:
        with replacing(kept, durable=False) as aside, aside.open("wb") as file:
            _write(file, path, data, header, check, progress)
        return _map(kept)
    except OSError as problem:
        logger.warning(
            "%s cannot be written (%s): the offsets are made again at every start", kept, problem
        )
    with tempfile.NamedTemporaryFile(prefix="rlflow-offsets-") as temporary:
        _write(temporary, path, data, header, check, progress)  # type: ignore[arg-type]
        return _map(Path(temporary.name))


def _read(path: Path, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray, str] | None:
    """What `map_offsets` returns, from an offsets file; None where there is none, or of another
    state of the records."""
    if not path.is_file():
        return None
    found = np.fromfile(path, _HEADER, count=1)
    if not len(found) or any(
        found[key] != expected[key] for key in ("magic", "size", "modified", "sample")
    ):
        return None
    count, empty = int(found["count"][0]), int(found["empty"][0])
    if path.stat().st_size != _HEADER.itemsize + count * ENTRY.itemsize + empty * _ROW.itemsize:
        return None
    with path.open("rb") as file:
        file.seek(_HEADER.itemsize)
        whole = hashlib.file_digest(file, "sha256").hexdigest().encode() == found["entries"][0]
    return _map(path) if whole else None


def _map(path: Path) -> tuple[np.ndarray, np.ndarray, str]:
    header = np.fromfile(path, _HEADER, count=1)
    # As a plain array: every access to an np.memmap makes another np.memmap, which is slow.
    count = int(header["count"][0])
    entries = np.memmap(path, ENTRY, "r", _HEADER.itemsize, (count,)).view(np.ndarray)
    empty = np.fromfile(path, _ROW, offset=_HEADER.itemsize + count * ENTRY.itemsize)
    return entries, empty, header["sha256"][0].decode()


def _write(
    file: BinaryIO,
    path: Path,
    data: mmap.mmap,
    header: np.ndarray,
    check: Check,
    progress: ShareProgress,
) -> None:
    """Header and entries; count and hash come last."""
    file.write(header.tobytes())
    digest, entries = hashlib.sha256(), hashlib.sha256()

    def keep(part: bytes) -> None:
        entries.update(part)
        file.write(part)

    for start in range(0, len(data), _HASHED):
        digest.update(data[start : start + _HASHED])  # reads the file ahead of what follows, too
    block: list[tuple[int, int, bool]] = []
    empty: list[int] = []
    count = 0
    for start, record in lines(data):
        if len(record) > _LONGEST:
            raise DataError(f"{path}: row {count} has {len(record)} bytes; the most is {_LONGEST}.")
        whole = check(record, count)
        if whole is None:
            empty.append(count)
        block.append((start, len(record), bool(whole)))
        count += 1
        if len(block) == _BLOCK:
            keep(np.array(block, ENTRY).tobytes())
            block.clear()
            progress(start / len(data))
    if count == len(empty):
        raise DataError(f"{path}: expected one JSON object per line, found none with text.")
    keep(np.array(block, ENTRY).tobytes() + np.array(empty, _ROW).tobytes())
    header["count"], header["empty"] = count, len(empty)
    header["sha256"] = digest.hexdigest().encode()
    header["entries"] = entries.hexdigest().encode()
    file.seek(0)
    file.write(header.tobytes())
    file.flush()
    progress(1.0)


def lines(data: mmap.mmap) -> Iterator[tuple[int, bytes]]:
    """(offset, record) of every line that is not blank, without surrounding blanks and byte order
    mark."""
    for _, start, line in records(data):
        record = (line if start else line.removeprefix(b"\xef\xbb\xbf")).strip()
        if record:
            yield start + line.index(record), record
