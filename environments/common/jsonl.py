"""Rows of the field's files: JSON objects one per line, and errors about the bad ones.

A record ends at a newline byte and nowhere else (text may hold U+2028 and the like); blank lines
are skipped.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

from rlflow.errors import DataError
from rlflow_environments.common.text import load_json

logger = logging.getLogger(__name__)

_SHOWN_BAD_ROWS = 3
T = TypeVar("T")


class BadRow(Exception):
    """Why one row cannot be read; `refuse` turns all of them into one DataError."""


def existing(path: str | Path, what: str) -> Path:
    """The path of a file. Raises DataError where there is none."""
    file = Path(path).expanduser()
    if not file.is_file():
        found = "a directory" if file.is_dir() else "nothing"
        raise DataError(
            f"{file}: expected the {what} as a .jsonl file, found {found} there. Give the path of "
            "an existing file."
        )
    return file


def records(data: mmap.mmap | bytes) -> Iterator[tuple[int, int, bytes]]:
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


def refuse(
    path: Path,
    what: str,
    bad: Sequence[tuple[str, str]],
    good: int,
    *,
    empty: int = 0,
    skip: bool = False,
) -> None:
    """Raises DataError if there are bad rows, each a (name, reason), or no good ones; with `skip`
    bad ones are a warning. empty: rows without text, which are neither."""
    if bad and path.suffix.lower() == ".csv":
        convert = (
            "import csv, json, sys; [print(json.dumps(row)) for row in csv.DictReader(sys.stdin)]"
        )
        source = shlex.quote(str(path))
        target = shlex.quote(str(path.with_suffix(".jsonl")))
        raise DataError(
            f"{path}: found CSV, expected the {what} as JSON Lines or parquet. Convert it by "
            f"`python -c '{convert}' < {source} > {target}`."
        )
    if bad:
        shown = "; ".join(f"{name}: {reason}" for name, reason in bad[:_SHOWN_BAD_ROWS])
        more = f"; and {len(bad) - _SHOWN_BAD_ROWS} more" if len(bad) > _SHOWN_BAD_ROWS else ""
        count = f"{len(bad)} of {good + empty + len(bad)} rows of the {what} are bad"
        if not skip:
            raise DataError(f"{path}: {count}: {shown}{more}. Fix or remove them.")
        logger.warning("%s: %s and skipped: %s%s", path, count, shown, more)
    if not good:
        none = f"{empty} rows without text" if empty else "an empty file"
        found = f"{len(bad)} bad ones only" if bad else none
        raise DataError(f"{path}: expected the {what}, one JSON object per line, found {found}.")
    logger.debug("%s: %d rows of the %s", path, good, what)


def read_each(path: str | Path, what: str, make: Callable[[dict[str, Any], int], T]) -> list[T]:
    """What `make` makes of each row and the number of its line; for a row of no use it raises
    BadRow. Raises DataError."""
    file, made, bad = existing(path, what), [], []
    for line, _, record in records(file.read_bytes()):
        try:
            made.append(make(parse_object(record), line))
        except BadRow as problem:
            bad.append((f"line {line}", str(problem)))
    refuse(file, what, bad, len(made))
    return made


def held_out(tasks: Sequence[Any]) -> dict[str, list[Any]]:
    """Every tenth task for validation; all of them for both where they are fewer than ten."""
    if len(tasks) < 10:
        return {"train": list(tasks), "val": list(tasks)}
    training = [task for number, task in enumerate(tasks) if number % 10]
    return {"train": training, "val": list(tasks[::10])}


def parse_object(record: bytes) -> dict[str, Any]:
    """The JSON object of a record. Raises BadRow."""
    try:
        row = load_json(record, "utf-8-sig")
    except UnicodeDecodeError as problem:
        raise BadRow(f"not UTF-8 ({problem.reason} at byte {problem.start})") from None
    except json.JSONDecodeError as problem:
        raise BadRow(f"not JSON ({problem.msg} at column {problem.colno})") from None
    except ValueError:
        raise BadRow("not JSON that can be read (a number of thousands of digits)") from None
    except RecursionError:
        raise BadRow("not JSON that can be read (nested too deeply)") from None
    if not isinstance(row, dict):
        raise BadRow(f"expected a JSON object, found {kind_of(row)}")
    return row


def text_of(row: dict[str, Any], key: str) -> str:
    """The text under a key. Raises BadRow where it is missing, empty or something else."""
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise BadRow(f"'{key}': expected text, found {kind_of(value)}")
    return value


def answer_of(row: dict[str, Any], key: str) -> str:
    """The text under a key, or the text of a number. Raises BadRow where it is anything else."""
    if (text := number_text(row.get(key))) is not None:
        return text
    return text_of(row, key)


def number_text(value: Any) -> str | None:
    """A number as people write it, a whole one without decimals; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        return None
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        return None
    return str(int(value)) if value == int(value) else f"{value}"


def are_messages(value: Any) -> bool:
    """Whether it is a list of {role, content} messages of text."""
    return isinstance(value, list) and bool(value) and all(map(_is_message, value))


def _is_message(value: Any) -> bool:
    texts = (value.get("role"), value.get("content")) if isinstance(value, Mapping) else (None,)
    return all(isinstance(text, str) for text in texts)


def kind_of(value: Any) -> str:
    """How a value is named in a message: JSON's words."""
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return "text" if value.strip() else "empty text"
    names = {
        bool: "true/false",
        int: "a number",
        float: "a number",
        dict: "an object",
        list: "a list",
    }
    return names.get(type(value), f"a {type(value).__name__}")
