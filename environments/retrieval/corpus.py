"""Readers and writers of the field's corpora and pages, one JSON object per line.

corpus.jsonl   {"id", "contents": "\"Title\"\ntext", "title"?, "url"?}, or {"title", "text"}
pages.jsonl    {"url", "contents"}
questions      see `questions`
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import orjson

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
from rlflow_environments.retrieval.records import (
    EMPTY,
    PARTIAL,
    WHOLE,
    Records,
    ShareProgress,
    dump_json,
    load_record,
    logger,
)


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
        """The contents without their title line, where they have one."""
        titled = title_of(title_of(self.contents)) == title_of(self.title)
        return self.contents.partition("\n")[2] if titled else self.contents

    @property
    def fields(self) -> dict[str, str]:
        """Its record in a corpus.jsonl."""
        return {"id": self.id, "title": self.title, "contents": self.contents, "url": self.url}


class Corpus(Sequence[Passage]):
    """The passages of a corpus.jsonl, also of one that is larger than memory.

    empty: the rows without text, which have a number, a vector even, and are never found. sha256:
    of the file."""

    def __init__(self, path: str | Path, *, progress: ShareProgress = lambda share: None) -> None:
        """Maps the file; the first time every row is checked. Raises DataError: missing or empty
        file, bad rows (all are counted)."""
        self._records = Records(path, "corpus", kind_of_row, progress)
        self.path, self.sha256 = self._records.path, self._records.sha256
        self.empty = self._records.rows_of(EMPTY)
        if self.empty:
            told = "%s: %d of %d rows have no text and are never found; the first is row %d"
            logger.warning(told, self.path, len(self.empty), len(self), min(self.empty))

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
        try:
            return passage_of(self.record(row), row)
        except BadRow as problem:  # the file was written into since it was checked
            raise DataError(f"{self.path}: row {row}: {problem}. Fix or remove it.") from None

    def record(self, row: int) -> dict[str, Any]:
        """The whole record of a row, as it stands in the file."""
        return parse_object(self._records[row][0])

    def document(self, row: int) -> bytes:
        """A record as a JSON object that has `id`, `contents` and `url`: as it stands if it has
        them, else completed."""
        record, kind = self._records[row]
        if kind == WHOLE:
            return record
        found = self[row]
        completed = {"id": found.id, "contents": found.contents, "url": found.url}
        return dump_json({**self.record(row), **completed})


class Pages:
    """The pages of a pages.jsonl by their URL, for `POST /access`."""

    def __init__(self, path: str | Path, *, progress: ShareProgress = lambda share: None) -> None:
        """Maps the file and hashes every URL. Raises DataError: no such file, a page without URL or
        contents."""
        self._records = Records(path, "pages", _kind_of_page, lambda share: progress(share / 2))
        self.path, self.sha256 = self._records.path, self._records.sha256
        hashes = np.empty(len(self), np.uint64)
        for row in range(len(self)):
            hashes[row] = _hash(self._url(row))
            if row % 65536 == 0:
                progress(0.5 + row / len(self) / 2)
        self._rows = np.argsort(hashes, kind="stable")
        self._hashes = hashes[self._rows]

    def __len__(self) -> int:
        return len(self._records)

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
                record, kind = self._records[row]
                return record if kind == WHOLE else dump_json(load_record(record))
            place -= 1
        return None

    def _url(self, row: int) -> str:
        return load_record(self._records[row][0])["url"]


def passage_of(row: Mapping[str, Any], number: int) -> Passage:
    """The passage of a record. number: its row, which is its name where it has none. Raises
    BadRow."""
    name = str(number if row.get("id") is None else row["id"])
    url = str(row.get("url") or f"doc://{name}")
    written = row.get("text") if row.get("contents") is None else row["contents"]
    if isinstance(written, str) and not written.strip():
        return Passage(name, "", "", url)
    if row.get("contents") is not None:
        contents = text_of(row, "contents")
        title = row.get("title") or title_of(contents)
    elif row.get("text") is not None:
        title = text_of(row, "title")
        contents = make_contents(title, text_of(row, "text"))
    else:
        raise BadRow("no 'contents' (nor 'title' and 'text')")
    if not isinstance(title, str):
        raise BadRow(f"'title': expected text, found {kind_of(title)}")
    return Passage(name, title, contents, url)


def kind_of_row(record: bytes, row: int) -> int:
    """Whether a record of a corpus can be sent as it is, see `Records`. Raises BadRow."""
    if _is_whole(record, "id", "contents", "url"):
        return WHOLE
    return PARTIAL if passage_of(parse_object(record), row).contents else EMPTY


def check_beginning(path: str | Path, most_bytes: int) -> None:
    """Raises DataError as `Corpus` does for bad rows among those that lie in the first `most_bytes`
    as a whole."""
    file = existing(path, "corpus")
    with file.open("rb") as opened:
        data = opened.read(most_bytes)
    kinds, bad = [], []
    for line, _, record in records(data[: data.rfind(b"\n") + 1] or data):
        try:
            kinds.append(kind_of_row(record, line))
        except BadRow as problem:
            bad.append((f"line {line}", str(problem)))
    empty = kinds.count(EMPTY)
    refuse(file, "corpus", bad, len(kinds) - empty, empty=empty)


def write_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Writes one JSON object per line, aside and renamed, so that no reader ever sees half a file;
    returns the path."""
    with replacing(path, durable=False) as aside, aside.open("wb") as file:
        for row in rows:
            text = json.dumps(row, ensure_ascii=False) + "\n"
            file.write(text.encode(errors="backslashreplace"))  # lone surrogates as JSON escapes
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


def title_of(contents: str) -> str:
    """The first line, without quotes."""
    return contents.partition("\n")[0].strip().strip('"')


def _kind_of_page(record: bytes, row: int) -> int:
    if _is_whole(record, "url", "contents"):
        return WHOLE
    page = parse_object(record)
    if not isinstance(page.get("url"), str) or not isinstance(page.get("contents"), str):
        raise BadRow("expected 'url' and 'contents' as text")
    return PARTIAL


def _is_whole(record: bytes, *keys: str) -> bool:
    """Whether every reader of JSON can read a record, and its keys are texts that are not blank."""
    try:
        row = orjson.loads(record)
    except orjson.JSONDecodeError:
        return False
    texts = [row.get(key) for key in keys] if isinstance(row, dict) else [None]
    return all(isinstance(text, str) and text.strip() for text in texts) and isinstance(
        row.get("title") or "", str
    )


def _hash(url: str) -> int:
    digest = hashlib.blake2b(url.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
