"""Rows of a file, told by its content and not by its name: JSON Lines, a JSON array, either of them
gzipped, parquet."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlflow.errors import DataError, install_command, needing
from rlflow_environments.common.jsonl import (
    BadRow,
    existing,
    kind_of,
    parse_object,
    records,
)
from rlflow_environments.common.text import load_json

Row = dict[str, Any]
_PARQUET, _GZIP = b"PAR1", b"\x1f\x8b"


def read_rows(path: str | Path, what: str) -> Iterator[tuple[str, Row | BadRow]]:
    """(name of the row, the row or why it is none) of every row that is not blank. Names: "line 3",
    "item 3", "row 3", from 1.

    Raises DataError: no such file, or one that is damaged as a whole; MissingPackageError: parquet
    without pyarrow.
    """
    file = existing(path, what)
    with file.open("rb") as opened:
        head = opened.read(4)
    if head == _PARQUET:
        return _parquet_rows(file, what)
    return _text_rows(_unzipped(file, what) if head.startswith(_GZIP) else file.read_bytes())


def _unzipped(file: Path, what: str) -> bytes:
    try:
        return gzip.decompress(file.read_bytes())
    except (OSError, EOFError, zlib.error) as problem:
        raise DataError(
            f"{file}: expected the {what} as gzipped JSON Lines, found {problem}. Get the file "
            "again."
        ) from None


def _text_rows(data: bytes) -> Iterator[tuple[str, Row | BadRow]]:
    items = _json_array(data)
    if items is not None:
        for number, item in enumerate(items, start=1):
            found = BadRow(f"expected a JSON object, found {kind_of(item)}")
            yield f"item {number}", item if isinstance(item, dict) else found
        return
    for line, _, record in records(data):
        try:
            row: Row | BadRow = parse_object(record)
        except BadRow as problem:
            row = problem
        yield f"line {line}", row


def _json_array(data: bytes) -> list[Any] | None:
    """The elements of a file that is one JSON array; None for any other."""
    if not data.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        return None
    try:
        items = load_json(data, "utf-8-sig")
    except (ValueError, RecursionError):
        return None  # lines that happen to begin with a list
    return items if isinstance(items, list) else None


def _parquet_rows(file: Path, what: str) -> Iterator[tuple[str, Row | BadRow]]:
    with needing(f"{file}: parquet", install_command("data")):
        import pyarrow
        import pyarrow.parquet
    number = 0
    try:
        table = pyarrow.parquet.ParquetFile(file)
        for batch in table.iter_batches(batch_size=4096):
            for row in batch.to_pylist():
                number += 1
                yield f"row {number}", row
    except (pyarrow.ArrowException, OSError) as problem:
        reason = str(problem).splitlines()[0]
        raise DataError(
            f"{file}: expected the {what} as parquet, found {reason}. Get the file again."
        ) from None
