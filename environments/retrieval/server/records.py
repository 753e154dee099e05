"""Passages and pages read where they lie: one memory map, whose memory all processes share,
whatever the size of the file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from rlflow.errors import DataError
from rlflow_environments.common.text import load_json
from rlflow_environments.retrieval.corpus import (
    Passage,
    PassageSequence,
    RowCheck,
    make_contents,
    parse_passage,
)
from rlflow_environments.retrieval.server.offsets import ShareProgress, map_file, map_offsets


class StoredCorpus(PassageSequence):
    """The passages of a corpus.jsonl, also of one that is larger than memory."""

    def __init__(self, path: str | Path, *, progress: ShareProgress = lambda share: None) -> None:
        """Maps the file and its offsets; the first time every row is checked. Raises DataError: no
        such file, a bad row."""
        self.path, self._map = map_file(path, "corpus")
        self._rows = RowCheck(self.path)
        self._entries, empty, self.sha256 = map_offsets(self.path, self._map, self._check, progress)
        self.empty = frozenset(empty.tolist())
        self._rows.report()

    def __len__(self) -> int:
        return len(self._entries)

    def passage(self, row: int) -> Passage:
        start, length, _ = self._entries[row].item()
        return parse_passage(self._map[start : start + length], row, self.path)

    def document(self, row: int) -> bytes:
        """A record as a JSON object that has `id`, `contents` and `url`: as it stands if it has
        them, else completed."""
        start, length, whole = self._entries[row].item()
        record = self._map[start : start + length]
        return record if whole else dump_json(complete_document(row, load_record(record)))

    def _check(self, record: bytes, number: int) -> bool | None:
        name, contents, url = _strings(record, ("id", "contents", "url"))
        if name and url and contents and contents.strip():
            self._rows.add(name)
            return True
        passage = parse_passage(record, number, self.path)
        self._rows.add(passage.id, empty=not passage.contents)
        return False if passage.contents else None


class Pages:
    """The pages of a pages.jsonl by their URL, for `POST /access`."""

    def __init__(self, path: str | Path, *, progress: ShareProgress = lambda share: None) -> None:
        """Maps the file and its offsets and hashes every URL. Raises DataError: no such file, a
        page without URL or contents."""
        self.path, self._map = map_file(path, "pages")
        self._entries, _, self.sha256 = map_offsets(
            self.path, self._map, self._check, lambda share: progress(share / 2)
        )
        hashes = np.empty(len(self), np.uint64)
        for row in range(len(self)):
            hashes[row] = _hash(self._url(row))
            if row % 65536 == 0:
                progress(0.5 + row / len(self) / 2)
        self._rows = np.argsort(hashes, kind="stable")
        self._hashes = hashes[self._rows]

    def __len__(self) -> int:
        return len(self._entries)

    def page(self, url: str) -> bytes | None:
        """The whole record of a page as JSON, None for an unknown one.

        A URL is looked up as it stands; one that is not known and contains `index.php/` once more
        as `index.php?title=`, the only rewriting that the field knows. Of several records of one
        URL the last counts, as in a dictionary."""
        found = self._find(url)
        if found is None and "index.php/" in url:
            found = self._find(url.replace("index.php/", "index.php?title="))
        return found

    def _find(self, url: str) -> bytes | None:
        wanted = np.uint64(_hash(url))
        place = int(np.searchsorted(self._hashes, wanted, side="right")) - 1
        while place >= 0 and self._hashes[place] == wanted:
            row = int(self._rows[place])
            if self._url(row) == url:
                record = self._record(row)
                return record if self._entries[row]["whole"] else dump_json(load_record(record))
            place -= 1
        return None

    def _record(self, row: int) -> bytes:
        start, length, _ = self._entries[row].item()
        return self._map[start : start + length]

    def _url(self, row: int) -> str:
        return load_record(self._record(row))["url"]

    def _check(self, record: bytes, row: int) -> bool:
        if all(_strings(record, ("url", "contents"))):
            return True
        try:
            page = load_record(record)
        except (ValueError, RecursionError) as problem:
            raise DataError(
                f"{self.path}: row {row}: not JSON ({str(problem)[:100]}). Fix or remove it."
            ) from None
        texts = (
            isinstance(page, dict)
            and isinstance(page.get("url"), str)
            and isinstance(page.get("contents"), str)
        )
        if not texts:
            raise DataError(
                f"{self.path}: row {row}: expected 'url' and 'contents' as text. Fix or remove it."
            )
        return False


def complete_document(row: int, record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with the three keys that clients of the field ask for; where it lacks them: the
    row as its id, `doc://<id>` as its url, title and text as its contents."""
    name = str(row if record.get("id") is None else record["id"])
    document = {**record, "id": name, "url": str(record.get("url") or f"doc://{name}")}
    if document.get("contents") is None:
        document["contents"] = make_contents(
            str(record.get("title") or ""), str(record.get("text") or "")
        )
    return document


def dump_json(value: Any) -> bytes:
    """JSON in UTF-8; what UTF-8 cannot hold (lone surrogates) is escaped."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value).encode()


def load_record(record: bytes) -> Any:
    """What Python's reader takes: also NaN and lone surrogates (as U+FFFD), which orjson
    refuses."""
    try:
        return orjson.loads(record)
    except orjson.JSONDecodeError:
        return load_json(record)


def _strings(record: bytes, keys: Sequence[str]) -> list[str | None]:
    """The values of keys that are text, None for others; all None for a record that orjson cannot
    read."""
    try:
        row = orjson.loads(record)
    except orjson.JSONDecodeError:
        row = None
    values = [row.get(key) if isinstance(row, dict) else None for key in keys]
    return [value if isinstance(value, str) else None for value in values]


def _hash(url: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(url.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little"
    )
