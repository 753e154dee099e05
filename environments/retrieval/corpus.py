"""Readers and writers of the field's corpora and pages, one JSON object per line.

    corpus.jsonl   {"id", "contents": "\"Title\"\ntext", "title"?, "url"?}, or {"title", "text"}
    pages.jsonl    {"url", "contents"}
    questions      see `questions`

A record ends at a newline byte and nowhere else (text may hold U+2028 and the like); blank lines
are skipped.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from rlflow.errors import DataError
from rlflow.storage.files import replacing
from rlflow_environments.common.jsonl import (
    BadRow,
    existing,
    kind_of,
    parse_object,
    records,
    refuse,
    text_of,
)

logger = logging.getLogger("rlflow.search.corpus")  # under `rlflow`, so that a run's log has it


@dataclass(frozen=True)
class Passage:
    """One retrieved document. contents: `"Title"\\ntext`, as it stands in the corpus; empty for a
    row without text. score: of the retriever that found it, higher is better, 0 for a passage that
    was not retrieved."""

    id: str
    title: str
    contents: str
    url: str
    score: float = 0.0

    @property
    def body(self) -> str:
        """The contents without their title line."""
        return self.contents.partition("\n")[2]

    @property
    def fields(self) -> dict[str, str]:
        """Its record in a corpus.jsonl."""
        return {"id": self.id, "title": self.title, "contents": self.contents, "url": self.url}


class PassageSequence(Sequence[Passage]):
    """Passages by row, from the end and by slice, for a class that has `__len__` and `passage`."""

    def passage(self, row: int) -> Passage:
        """The passage of a row from 0 to the length less 1."""
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> Passage: ...

    @overload
    def __getitem__(self, index: slice) -> list[Passage]: ...

    def __getitem__(self, index: int | slice) -> Passage | list[Passage]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        return self.passage(range(len(self))[index])


class Corpus(PassageSequence):
    """The passages of a corpus.jsonl: read from a memory map when asked for, so that only offsets
    stay in memory.

    empty: the rows without text, which have a number, a vector even, and are never found."""

    def __init__(self, path: str | Path, *, skip_bad_rows: bool = False) -> None:
        """Maps the file and checks every row once. Raises DataError: missing or empty file, bad
        rows (all are counted); with `skip_bad_rows` only where no row is good."""
        self.path = existing(path, "corpus")
        with self.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size  # an empty file cannot be mapped
            self._map: mmap.mmap | bytes = b""
            if size:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._starts, self._ends = array("q"), array("q")
        bad: list[tuple[str, str]] = []
        rows = RowCheck(self.path)
        for start, end, _ in _good_rows(self._map, rows, bad):
            self._starts.append(start)
            self._ends.append(end)
        self.empty = frozenset(rows.empty)
        good = len(self._starts) - len(self.empty)
        refuse(self.path, "corpus", bad, good, skip=skip_bad_rows)
        rows.report()

    def __len__(self) -> int:
        return len(self._starts)

    def passage(self, row: int) -> Passage:
        return _passage(self.record(row), row)

    def record(self, row: int) -> dict[str, Any]:
        """The whole record of a row, as it stands in the file."""
        return parse_object(self._map[self._starts[row] : self._ends[row]])

    def with_text(self) -> Iterator[Passage]:
        """The passages that can be found, in their order."""
        return (self[row] for row in range(len(self)) if row not in self.empty)


class RowCheck:
    """What is to be said of a corpus as a whole. number: of the next row, by which rows without an
    id are named. empty: the rows without text."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.number = 0
        self.empty = array("q")
        self._ids = array("q")

    def add(self, name: str, empty: bool = False) -> None:
        """The next row is not bad. empty: it has no text."""
        if empty:
            self.empty.append(self.number)
        else:
            self._ids.append(hash(name))
        self.number += 1

    def report(self) -> None:
        """Says in one line each what was left out and which ids are not unique."""
        import numpy as np

        if self.empty:
            text = "%s: %d of %d rows have no text and are never found; the first is row %d"
            logger.warning(text, self._path, len(self.empty), self.number, self.empty[0])
        ids = np.frombuffer(self._ids, np.int64)
        repeated = len(ids) - len(np.unique(ids))
        if repeated:
            text = (
                "%s: %d of %d rows have the id of an earlier row; results tell them apart by their "
                "text only"
            )
            logger.warning(text, self._path, repeated, len(ids))


def make_passage(record: Mapping[str, Any], row: int) -> Passage:
    """The passage of a corpus record. Raises DataError for a record without text."""
    try:
        passage = _passage(dict(record), row)
        if not passage.contents:
            raise BadRow("expected text, found empty text")
    except BadRow as problem:
        raise DataError(f"record {row}: {problem}. Build the index again.") from None
    return passage


def check_beginning(path: str | Path, most_bytes: int) -> None:
    """Raises DataError as `Corpus` does for bad rows among those that lie in the first `most_bytes`
    as a whole."""
    file = existing(path, "corpus")
    with file.open("rb") as opened:
        data = opened.read(most_bytes)
    data = data[: data.rfind(b"\n") + 1] or data
    bad: list[tuple[str, str]] = []
    good = sum(bool(passage.contents) for _, _, passage in _good_rows(data, RowCheck(file), bad))
    refuse(file, "corpus", bad, good)


def _good_rows(
    data: mmap.mmap | bytes, rows: RowCheck, bad: list[tuple[str, str]]
) -> Iterator[tuple[int, int, Passage]]:
    """Start, end and passage of every row that is not bad; tells `rows` of all and `bad` of the
    others.

    Rows without an id are named by their number among the rows that are not bad, as if the bad ones
    had been deleted."""
    for line, start, record in records(data):
        try:
            passage = _passage(parse_object(record), rows.number - len(bad))
        except BadRow as problem:
            rows.number += 1
            bad.append((f"line {line}", str(problem)))
        else:
            rows.add(passage.id, empty=not passage.contents)
            yield start, start + len(record), passage


def parse_passage(record: bytes, row: int, path: str | Path) -> Passage:
    """The passage of one record of a corpus. Raises DataError that names the row (from 0)."""
    try:
        return _passage(parse_object(record), row)
    except BadRow as problem:
        raise DataError(f"{path}: row {row}: {problem}. Fix or remove it.") from None


def write_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Writes one JSON object per line, aside and renamed, so that no reader ever sees half a file;
    returns the path."""
    with replacing(path, durable=False) as aside, aside.open("wb") as file:
        for row in rows:
            text = json.dumps(row, ensure_ascii=False) + "\n"
            file.write(
                text.encode(errors="backslashreplace")
            )  # lone surrogates as JSON escapes them
    return Path(path)


def write_corpus(path: str | Path, passages: Iterable[Passage]) -> Path:
    """Writes passages as a corpus.jsonl {id, title, contents, url}."""
    return write_rows(path, (passage.fields for passage in passages))


def write_pages(path: str | Path, pages: Mapping[str, str]) -> Path:
    """Writes {url: contents} as a pages.jsonl."""
    return write_rows(path, ({"url": url, "contents": contents} for url, contents in pages.items()))


def make_contents(title: str, text: str) -> str:
    """`"Title"\\ntext`: the field's one-string form of a passage (Search-R1 corpus)."""
    return f'"{title}"\n{text}'


def _passage(row: dict[str, Any], number: int) -> Passage:
    name = str(number if row.get("id") is None else row["id"])
    url = str(row.get("url") or f"doc://{name}")
    written = row.get("text") if row.get("contents") is None else row["contents"]
    if isinstance(written, str) and not written.strip():
        return Passage(name, "", "", url)
    if row.get("contents") is not None:
        contents = text_of(row, "contents")
        title = row.get("title") or contents.partition("\n")[0].strip().strip('"')
    elif row.get("text") is not None:
        title = text_of(row, "title")
        contents = make_contents(title, text_of(row, "text"))
    else:
        raise BadRow("no 'contents' (nor 'title' and 'text')")
    if not isinstance(title, str):
        raise BadRow(f"'title': expected text, found {kind_of(title)}")
    return Passage(name, title, contents, url)
