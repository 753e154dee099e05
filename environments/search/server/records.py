"""The records of a .jsonl file of any size, read where they lie: a memory map of the file and one of its offsets.

The offsets are written once, beside the file (`corpus.jsonl.offsets`), and mapped by every later process: the pages of both maps
are shared by all of them, so that a second server costs no second copy.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import orjson

from rlflow.errors import DataError
from rlflow_environments.search.formats import Passage, make_contents, parse_passage

logger = logging.getLogger(__name__)

ENTRY = np.dtype([("start", "<u8"), ("length", "<u4"), ("whole", "u1")])
"""Of one record: where it starts, its bytes without surrounding blanks, 1 if it can be sent as it is (see `document`)."""

_MAGIC = b"rlflow offsets 1"
_HEADER = np.dtype([("magic", "S16"), ("size", "<u8"), ("modified", "<i8"), ("count", "<u8")])
_BLOCK = 1 << 16  # entries that are gathered before they are written

Progress = Callable[[float], None]
"""Told how much is done, from 0 to 1."""


class Records:
    """The records of one file: by row, as bytes. A record ends at a newline byte and nowhere else; blank lines do not count."""

    def __init__(self, path: str | Path, *, progress: Progress = lambda share: None) -> None:
        """Maps the file and its offsets, which are made first where they are missing or older than the file.

        Raises DataError: no such file, an empty one, or a record of 4 GiB or more.
        """
        self.path = Path(path).expanduser()
        if not self.path.is_file():
            raise DataError(f"{self.path}: expected a .jsonl file, found none there. Give the path of an existing file.")
        if not self.path.stat().st_size:
            raise DataError(f"{self.path}: expected one JSON object per line, found an empty file.")
        with self.path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._entries = _offsets(self.path, self._map, progress)

    def __len__(self) -> int:
        return len(self._entries)

    def record(self, row: int) -> bytes:
        """The bytes of a record as they stand in the file, without surrounding blanks."""
        start, length, _ = self._entries[row].item()
        return self._map[start : start + length]

    def document(self, row: int) -> bytes:
        """The record as a JSON object that has `id`, `contents` and `url`: as it stands if it has, else with them added.

        A missing id is the row, a missing url `doc://<id>`, missing contents are made from title and text.
        """
        start, length, whole = self._entries[row].item()
        record = self._map[start : start + length]
        return record if whole else _completed(record, row)


class StoredCorpus(Sequence[Passage]):
    """The passages of a corpus.jsonl that may be larger than memory. `document(row)`: a whole stored record as JSON."""

    def __init__(self, path: str | Path, *, progress: Progress = lambda share: None) -> None:
        """See Records. A bad row raises DataError when it is read, not before."""
        self._records = Records(path, progress=progress)
        self.path = self._records.path
        self.document = self._records.document

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> Passage: ...

    @overload
    def __getitem__(self, index: slice) -> list[Passage]: ...

    def __getitem__(self, index: int | slice) -> Passage | list[Passage]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        row = range(len(self))[index]
        return parse_passage(self._records.record(row), row, self.path)


def complete_document(row: int, record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with the three keys that every client of the field may ask for: id, contents, url."""
    name = str(row if record.get("id") is None else record["id"])
    document = {**record, "id": name}
    if document.get("contents") is None:
        document["contents"] = make_contents(str(record.get("title") or ""), str(record.get("text") or ""))
    document["url"] = str(record.get("url") or f"doc://{name}")
    return document


def _completed(record: bytes, row: int) -> bytes:
    document = complete_document(row, json.loads(record.decode("utf-8-sig")))
    return json.dumps(document, ensure_ascii=False, allow_nan=True).encode("utf-8", "surrogatepass")


def _offsets(path: Path, data: mmap.mmap, progress: Progress) -> np.ndarray:
    """The entries of a file, from its offsets file if that is of the present file, else made and written there.

    Where nothing can be written beside the file they lie in an unnamed temporary file: mapped all the same.
    """
    status = path.stat()
    header = np.array([(_MAGIC, status.st_size, status.st_mtime_ns, 0)], _HEADER)
    kept = path.with_name(f"{path.name}.offsets")
    entries = _read_offsets(kept, header)
    if entries is not None:
        return entries
    aside = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with aside.open("wb") as file:
            _write_offsets(file, data, header, path, progress)
        aside.replace(kept)
    except OSError as problem:
        aside.unlink(missing_ok=True)
        logger.warning("%s: the offsets cannot be kept there (%s): they are made again at every start", kept, problem)
        with tempfile.NamedTemporaryFile(prefix="rlflow-offsets-") as file:
            _write_offsets(file, data, header, path, progress)
            return _map_entries(Path(file.name))
    return _map_entries(kept)


def _read_offsets(path: Path, expected: np.ndarray) -> np.ndarray | None:
    """The entries of an offsets file; None where there is none, or of another state of the records."""
    if not path.is_file():
        return None
    found = np.fromfile(path, _HEADER, count=1)
    if not len(found) or any(found[key] != expected[key] for key in ("magic", "size", "modified")):
        return None
    if path.stat().st_size != _HEADER.itemsize + int(found["count"][0]) * ENTRY.itemsize:
        return None
    return _map_entries(path)


def _map_entries(path: Path) -> np.ndarray:
    return np.memmap(path, ENTRY, mode="r", offset=_HEADER.itemsize)


def _write_offsets(file: Any, data: mmap.mmap, header: np.ndarray, path: Path, progress: Progress) -> None:
    """Header and entries; the count is put into the header last."""
    file.write(header.tobytes())
    block: list[tuple[int, int, bool]] = []
    count = 0
    for start, record in _lines(data):
        if len(record) > np.iinfo(np.uint32).max:
            raise DataError(f"{path}: record {count + 1} has {len(record)} bytes; the most is 4 GiB.")
        block.append((start, len(record), _is_whole(record)))
        count += 1
        if len(block) == _BLOCK:
            file.write(np.array(block, ENTRY).tobytes())
            block.clear()
            progress(start / len(data))
    if not count:
        raise DataError(f"{path}: expected one JSON object per line, found only blank lines.")
    file.write(np.array(block, ENTRY).tobytes())
    header["count"] = count
    file.seek(0)
    file.write(header.tobytes())
    file.flush()
    progress(1.0)


def _lines(data: mmap.mmap) -> Iterator[tuple[int, bytes]]:
    """(offset, record) of every line that is not blank, without surrounding blanks and byte order mark."""
    start, end = 0, len(data)
    while start < end:
        stop = data.find(b"\n", start)
        stop = end if stop < 0 else stop
        line = data[start:stop]
        if start == 0:
            line = line.removeprefix(b"\xef\xbb\xbf")
        record = line.strip()
        if record:
            yield stop - len(line) + line.index(record), record
        start = stop + 1


def _is_whole(record: bytes) -> bool:
    """Whether a record is JSON that can be sent without a change."""
    try:
        row = orjson.loads(record)
    except orjson.JSONDecodeError:  # also lone surrogates and NaN, which Python's own reader takes
        return False
    return isinstance(row, dict) and all(isinstance(row.get(key), str) for key in ("id", "contents", "url")) and bool(row["url"])
