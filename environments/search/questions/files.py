"""The evaluation sets of a folder as their releases lay them out, and the rows of files, by content
and not by name: JSON Lines, a JSON array, either of them gzipped, parquet."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlflow.errors import DataError, install_command, needing
from rlflow_environments.common.jsonl import BadRow, existing, kind_of, parse_object, records

Row = dict[str, Any]

EVALUATION_SETS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
"""The seven sets that Search-R1 and its successors report, by their names in FlashRAG."""

SUFFIXES = (".jsonl", ".json", ".parquet", ".jsonl.gz")

_OTHER_NAMES = {
    "naturalquestions": "nq",
    "nqopen": "nq",
    "tqa": "triviaqa",
    "hotpot": "hotpotqa",
    "2wiki": "2wikimultihopqa",
    "2wikimultihop": "2wikimultihopqa",
}
_PARTS = {"train": ("train",), "val": ("test", "dev", "val", "validation", "train")}
"""Which part of a set serves a split, the first that is there: FlashRAG's order. Not every set has
a test part with answers."""
_SUBSET = re.compile(r"(_rand\d+|_(test|dev|val|train))+$", re.IGNORECASE)
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
        yield f"line {line}", _parsed(record)


def _parsed(record: bytes) -> Row | BadRow:
    try:
        return parse_object(record)
    except BadRow as problem:
        return problem


def _json_array(data: bytes) -> list[Any] | None:
    """The elements of a file that is one JSON array; None for any other."""
    if not data.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        return None
    try:
        items = json.loads(data.decode("utf-8-sig"))
    except ValueError:
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


def set_name(path: str | Path) -> str:
    """The set that a file or folder holds, by its name: `NQ_rand1000/test.jsonl`, `nq.parquet` and
    `nq_dev.jsonl` are `nq`."""
    path = Path(path)
    name = path.name
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    if name in {part for parts in _PARTS.values() for part in parts} and path.parent.name:
        name = path.parent.name
    plain = re.sub(r"[^a-z0-9]", "", _SUBSET.sub("", name).lower())
    known = _OTHER_NAMES.get(plain, plain)
    return known if known in EVALUATION_SETS else name


def find_sets(folder: str | Path, split: str = "val") -> dict[str, Path]:
    """{set: file} of the sets in a folder, those of EVALUATION_SETS first, in their order.

    Looked for, with a suffix of SUFFIXES: `<set>/test`, else dev, val, train (FlashRAG,
    ASearcher-test-data); `<set>` alone or with `_test`, `_dev`; and `test` in the folder itself
    (Search-R1: its rows name their sets). Raises DataError: no set there, or one twice.
    """
    folder = Path(folder).expanduser()
    found: dict[str, Path] = {}
    for file in _candidates(folder, _PARTS.get(split, (split,))):
        name = set_name(file)
        if name in found:
            raise DataError(
                f"{folder}: the set {name} is there twice, {found[name]} and {file}. Give the file "
                "that you mean."
            )
        found[name] = file
    if not found:
        raise DataError(
            f"{folder}: expected a file of questions or a folder of sets, found a directory there "
            "without any. Looked for SET/test, dev, val or train, SET and SET_test, each as "
            f"{', '.join(SUFFIXES)}; SET is {', '.join(EVALUATION_SETS)}."
        )
    order = {name: place for place, name in enumerate(EVALUATION_SETS)}
    return dict(sorted(found.items(), key=lambda item: (order.get(item[0], len(order)), item[0])))


def _candidates(folder: Path, parts: tuple[str, ...]) -> Iterator[Path]:
    """One file per subfolder that has a part, the files named after sets, else the folder's own
    part."""
    nothing = True
    for child in sorted(folder.iterdir()):
        file = _part(child, parts) if child.is_dir() else child
        if file is not None and (child.is_dir() or _names_a_set(child)):
            nothing = False
            yield file
    own = _part(folder, parts) if nothing else None
    if own is not None:
        yield own


def _part(folder: Path, parts: tuple[str, ...]) -> Path | None:
    files = (folder / f"{part}{suffix}" for part in parts for suffix in SUFFIXES)
    return next((file for file in files if file.is_file()), None)


def _names_a_set(file: Path) -> bool:
    return file.name.endswith(SUFFIXES) and set_name(file) in EVALUATION_SETS
