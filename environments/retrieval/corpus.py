"""Readers and writers of the field's corpora and pages, one JSON object per line.

    corpus.jsonl   {"id", "contents": "\"Title\"\ntext", "title"?, "url"?}, or {"title", "text"}
    pages.jsonl    {"url", "contents"}
    questions      see `questions`

A record ends at a newline byte and nowhere else (text may hold U+2028 and the like); blank lines are skipped.
"""

from __future__ import annotations

import json
import mmap
import os
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from rlflow.errors import DataError
from rlflow.storage.files import replacing
from rlflow_environments.common.jsonl import BadRow, existing, kind_of, parse_object, records, refuse, text_of


@dataclass(frozen=True)
class Passage:
    """One retrieved document. contents: `"Title"\\ntext`, as it stands in the corpus. score: of the retriever that found it,
    higher is better, 0 for a passage that was not retrieved."""

    id: str
    title: str
    contents: str
    url: str
    score: float = 0.0

    @property
    def body(self) -> str:
        """The contents without their title line."""
        return self.contents.partition("\n")[2]


class Corpus(Sequence[Passage]):
    """The passages of a corpus.jsonl: read from a memory map when asked for, so that only offsets stay in memory."""

    def __init__(self, path: str | Path) -> None:
        """Maps the file and checks every row once. Raises DataError: missing or empty file, bad rows (all are counted)."""
        self.path = existing(path, "corpus")
        with self.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size  # an empty file cannot be mapped
            self._map: mmap.mmap | bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        self._starts = array("q")
        self._lines = array("q")
        bad: list[tuple[str, str]] = []
        for line, start, record in records(self._map):
            try:
                _passage(parse_object(record), len(self._starts))
            except BadRow as problem:
                bad.append((f"line {line}", str(problem)))
                continue
            self._starts.append(start)
            self._lines.append(start + len(record))
        refuse(self.path, "corpus", bad, len(self._starts))

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> Passage: ...

    @overload
    def __getitem__(self, index: slice) -> list[Passage]: ...

    def __getitem__(self, index: int | slice) -> Passage | list[Passage]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        row = range(len(self))[index]
        return _passage(self.record(row), row)

    def record(self, row: int) -> dict[str, Any]:
        """The whole record of a row, as it stands in the file."""
        return parse_object(self._map[self._starts[row] : self._lines[row]])


def make_passage(record: Mapping[str, Any], row: int) -> Passage:
    """The passage of a corpus record. Raises DataError for a record without text."""
    try:
        return _passage(dict(record), row)
    except BadRow as problem:
        raise DataError(f"record {row}: {problem}. Build the index again.") from None


def read_passages(path: str | Path, *, skip_bad_rows: bool = False) -> list[Passage]:
    """All passages of a corpus, in memory, as a new corpus would have them. Raises DataError as `Corpus` does, with
    `skip_bad_rows` only where no row is good."""
    file = existing(path, "corpus")
    passages: list[Passage] = []
    bad: list[tuple[str, str]] = []
    for line, _, record in records(file.read_bytes()):
        try:
            passages.append(_passage(parse_object(record), len(passages)))
        except BadRow as problem:
            bad.append((f"line {line}", str(problem)))
    refuse(file, "corpus", bad, len(passages), skip=skip_bad_rows)
    return passages


def parse_passage(record: bytes, row: int, path: str | Path) -> Passage:
    """The passage of one record of a corpus. Raises DataError that names the row (from 0)."""
    try:
        return _passage(parse_object(record), row)
    except BadRow as problem:
        raise DataError(f"{path}: row {row}: {problem}. Fix or remove it.") from None


def write_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Writes one JSON object per line, aside and renamed, so that no reader ever sees half a file; returns the path."""
    with replacing(path, durable=False) as aside, aside.open("wb") as file:
        for row in rows:
            text = json.dumps(row, ensure_ascii=False) + "\n"
            file.write(text.encode(errors="backslashreplace"))  # lone surrogates as JSON escapes them
    return Path(path)


def write_corpus(path: str | Path, passages: Iterable[Passage]) -> Path:
    """Writes passages as a corpus.jsonl {id, title, contents, url}."""
    return write_rows(path, ({"id": p.id, "title": p.title, "contents": p.contents, "url": p.url} for p in passages))


def write_pages(path: str | Path, pages: Mapping[str, str]) -> Path:
    """Writes {url: contents} as a pages.jsonl."""
    return write_rows(path, ({"url": url, "contents": contents} for url, contents in pages.items()))


def make_contents(title: str, text: str) -> str:
    """`"Title"\\ntext`: the field's one-string form of a passage (Search-R1 corpus)."""
    return f'"{title}"\n{text}'


def _passage(row: dict[str, Any], number: int) -> Passage:
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
    name = str(number if row.get("id") is None else row["id"])
    return Passage(name, title, contents, str(row.get("url") or f"doc://{name}"))
