"""Readers and writers of the field's files: corpus, pages and questions, one JSON object per line.

    corpus.jsonl   {"id", "contents": "\"Title\"\ntext", "title"?, "url"?}, or {"title", "text"}
    pages.jsonl    {"url", "contents"}
    train / val    {"prompt" or "question", "solutions": text or list, ...}

A record ends at a newline byte and nowhere else (text may hold U+2028 and the like); blank lines are skipped.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, overload

from rlflow.errors import DataError
from rlflow.types import Task
from rlflow_environments.search.protocol import render_prompt

logger = logging.getLogger(__name__)

GOLD_KEYS = ("solutions", "golden_answers", "answers", "answer")
"""Where a row's gold answers may stand; the first key that is present is taken."""

_SHOWN_BAD_ROWS = 3

T = TypeVar("T")


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
        self.path = _existing(path, "corpus")
        with self.path.open("rb") as file:
            # An empty file cannot be mapped.
            self._map: mmap.mmap | bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if _size(file) else b""
        self._starts = array("q")
        self._lines = array("q")
        bad: list[tuple[int, str]] = []
        for line, start, record in _records(self._map):
            try:
                _passage(_object(record), len(self._starts))
            except _BadRow as problem:
                bad.append((line, str(problem)))
                continue
            self._starts.append(start)
            self._lines.append(start + len(record))
        _refuse(self.path, "corpus", bad, len(self._starts))

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
        return _object(self._map[self._starts[row] : self._lines[row]])


def make_passage(record: Mapping[str, Any], row: int) -> Passage:
    """The passage of a corpus record. Raises DataError for a record without text."""
    try:
        return _passage(dict(record), row)
    except _BadRow as problem:
        raise DataError(f"record {row}: {problem}. Build the index again.") from None


def read_tasks(path: str | Path, split: str, prompt_template: str = "searchr1") -> list[Task]:
    """The questions of a file as tasks, in file order.

    A row's `prompt` (text or messages) is used verbatim; a row with only `question` is put into `prompt_template`.
    Task.answer is the list of gold answers, Task.id the row's `id` or `{split}-{row}`, Task.metadata all further keys.
    Raises DataError: missing or empty file, bad rows (all are counted), a row without a gold answer being bad.
    """
    file = _existing(path, f"{split} questions")
    used: set[str] = set()

    def parse(row: dict[str, Any], number: int) -> Task:
        task = _task(row, f"{split}-{number}", prompt_template)
        if task.id in used:  # ids tell groups apart, so they must differ even where the file's do not
            task = Task(f"{task.id}@{number}", task.prompt, task.answer, task.metadata)
        used.add(task.id)
        return task

    return _read(file, f"{split} questions", parse)


def parse_passage(record: bytes, row: int, path: str | Path) -> Passage:
    """The passage of one record of a corpus. Raises DataError that names the row (from 0)."""
    try:
        return _passage(_object(record), row)
    except _BadRow as problem:
        raise DataError(f"{path}: row {row}: {problem}. Mend or remove it.") from None


def read_pages(path: str | Path) -> dict[str, str]:
    """{url: contents} of a pages.jsonl. Raises DataError as `read_tasks` does."""

    def parse(row: dict[str, Any], number: int) -> tuple[str, str]:
        return _text(row, "url"), _text(row, "contents")

    return dict(_read(_existing(path, "pages"), "pages", parse))


def write_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Writes one JSON object per line, aside and renamed, so that no reader ever sees half a file; returns the path."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f"{target.name}.{os.getpid()}.partial")
    with aside.open("w", encoding="utf-8", newline="\n") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    aside.replace(target)
    return target


def write_corpus(path: str | Path, passages: Iterable[Passage]) -> Path:
    """Writes passages as a corpus.jsonl {id, title, contents, url}."""
    return write_rows(path, ({"id": p.id, "title": p.title, "contents": p.contents, "url": p.url} for p in passages))


def write_pages(path: str | Path, pages: Mapping[str, str]) -> Path:
    """Writes {url: contents} as a pages.jsonl."""
    return write_rows(path, ({"url": url, "contents": contents} for url, contents in pages.items()))


def make_contents(title: str, text: str) -> str:
    """`"Title"\\ntext`: the field's one-string form of a passage (Search-R1 corpus)."""
    return f'"{title}"\n{text}'


class _BadRow(Exception):
    """Why one row cannot be read; `_refuse` turns all of them into one DataError."""


def _existing(path: str | Path, what: str) -> Path:
    file = Path(path).expanduser()
    if not file.is_file():
        found = "a directory" if file.is_dir() else "nothing"
        raise DataError(
            f"{file}: expected the {what} as a .jsonl file, found {found} there. Give the path of an existing file."
        )
    return file


def _size(file: Any) -> int:
    return os.fstat(file.fileno()).st_size


def _records(data: mmap.mmap | bytes) -> Iterator[tuple[int, int, bytes]]:
    """(line number from 1, offset, record) of every line that is not blank."""
    start, line, end = 0, 0, len(data)
    while start < end:
        stop = data.find(b"\n", start)
        stop = end if stop < 0 else stop
        line += 1
        record = data[start:stop]
        if record.strip():
            yield line, start, record
        start = stop + 1


def _read(path: Path, what: str, parse: Callable[[dict[str, Any], int], T]) -> list[T]:
    """Every row parsed; `parse` gets the row and its number from 0, blank lines not counted."""
    parsed: list[T] = []
    bad: list[tuple[int, str]] = []
    for number, (line, _, record) in enumerate(_records(path.read_bytes())):
        try:
            parsed.append(parse(_object(record), number))
        except _BadRow as problem:
            bad.append((line, str(problem)))
    _refuse(path, what, bad, len(parsed))
    return parsed


def _refuse(path: Path, what: str, bad: list[tuple[int, str]], good: int) -> None:
    """Raises DataError if there are bad rows or no rows at all."""
    if bad:
        shown = "; ".join(f"line {line}: {reason}" for line, reason in bad[:_SHOWN_BAD_ROWS])
        more = f"; and {len(bad) - _SHOWN_BAD_ROWS} more" if len(bad) > _SHOWN_BAD_ROWS else ""
        count = f"{len(bad)} of {good + len(bad)} rows of the {what} are bad"
        raise DataError(f"{path}: {count}: {shown}{more}. Mend or remove them.")
    if not good:
        raise DataError(f"{path}: expected the {what}, one JSON object per line, found an empty file.")
    logger.debug("%s: %d rows of the %s", path, good, what)


def _object(record: bytes) -> dict[str, Any]:
    try:
        row = json.loads(record.decode("utf-8-sig"))
    except UnicodeDecodeError as problem:
        raise _BadRow(f"not UTF-8 ({problem.reason} at byte {problem.start})") from None
    except json.JSONDecodeError as problem:
        raise _BadRow(f"not JSON ({problem.msg} at column {problem.colno})") from None
    if not isinstance(row, dict):
        raise _BadRow(f"expected a JSON object, found {_kind(row)}")
    return row


def _passage(row: dict[str, Any], number: int) -> Passage:
    if row.get("contents") is not None:
        contents = _text(row, "contents")
        title = row.get("title") or contents.partition("\n")[0].strip().strip('"')
    elif row.get("text") is not None:
        title = _text(row, "title")
        contents = make_contents(title, _text(row, "text"))
    else:
        raise _BadRow("no 'contents' (nor 'title' and 'text')")
    if not isinstance(title, str):
        raise _BadRow(f"'title': expected text, found {_kind(title)}")
    name = str(number if row.get("id") is None else row["id"])
    return Passage(name, title, contents, str(row.get("url") or f"doc://{name}"))


def _task(row: dict[str, Any], name: str, prompt_template: str) -> Task:
    if row.get("prompt") is not None:
        prompt = _prompt(row["prompt"])
    elif row.get("question") is not None:
        prompt = render_prompt(prompt_template, _text(row, "question"))
    else:
        raise _BadRow("no 'prompt' and no 'question'")
    gold_key = next((key for key in GOLD_KEYS if row.get(key) is not None), GOLD_KEYS[0])
    golds = _golds(row.get(gold_key), gold_key)
    metadata = {key: value for key, value in row.items() if key not in ("prompt", "id", gold_key)}
    return Task(str(name if row.get("id") is None else row["id"]), prompt, golds, metadata)


def _prompt(value: Any) -> str | list[dict[str, str]]:
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value and all(_is_message(message) for message in value):
        return [{"role": message["role"], "content": message["content"]} for message in value]
    raise _BadRow(f"'prompt': expected text or a list of {{role, content}} messages, found {_kind(value)}")


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _golds(value: Any, key: str) -> list[str]:
    values = value if isinstance(value, list) else [value]
    wrong = [
        item
        for item in values
        if item is not None and (isinstance(item, bool) or not isinstance(item, (str, int, float)))
    ]
    if wrong:
        raise _BadRow(f"'{key}': expected text or a list of texts, found {_kind(wrong[0])}")
    golds = [str(item) for item in values if item is not None and str(item).strip()]
    if not golds:
        raise _BadRow(f"no gold answer ('{key}' is missing or empty)")
    return golds


def _text(row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise _BadRow(f"'{key}': expected text, found {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    """How a value is named in a message: JSON's words."""
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return "text" if value.strip() else "empty text"
    names = {bool: "true/false", int: "a number", float: "a number", dict: "an object", list: "a list"}
    return names[type(value)]
