"""The evaluation sets of a folder as their releases lay them out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from rlflow.errors import DataError

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
