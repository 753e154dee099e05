"""What an index costs: bytes per vector, memory to build it. Predictions by arithmetic, checked against
measurements."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlflow.errors import ConfigError

_SCALAR_BITS = {"SQ8": 8, "SQ6": 6, "SQ4": 4, "SQfp16": 16, "SQbf16": 16, "Flat": 32}
_LIST_ID = 8  # faiss keeps a 64-bit id beside every code of an inverted list
_GROWTH = 2.0  # faiss appends to std::vector: while one grows, the old copy is there too
_LIST_GROWTH = 1.5  # many short vectors do not all grow at once
_TRAINING_ROWS, _TRAINING_ROWS_PER_LIST = 65_536, 64
_COPIED = 64 << 20  # bytes moved at a time
_BM25_BYTES_PER_CORPUS_BYTE = (
    10.0  # measured on English text: ids of words as Python lists, then scores as sparse matrices
)


@dataclass(frozen=True)
class IndexKind:
    """A parsed kind. code_bytes: of one vector; lists: of an IVF index, 0 otherwise; links: HNSW's M, 0 otherwise."""

    name: str
    code_bytes: float
    lists: int = 0
    links: int = 0

    @property
    def graph_bytes(self) -> float:
        """Of one vector: 2M neighbours at the lowest level and M at each of the others, 32 bits each (Malkov and Yashunin
        2018)."""
        return self.links * 9.0


def parse_kind(name: str, dimensions: int) -> IndexKind:
    """What an index_factory string (or `torch`) costs. Raises ConfigError for strings whose cost is not known here."""
    if name == "torch":
        return IndexKind(name, 4.0 * dimensions)
    lists = links = 0
    code = "Flat"
    for part in name.split(","):
        if found := re.fullmatch(r"IVF(\d+)(k?)(?:_HNSW\d+)?", part):
            lists = int(found[1]) * (1024 if found[2] else 1)
        elif found := re.fullmatch(r"HNSW(\d+)(?:_(\w+))?", part):
            links, code = int(found[1]), found[2] or "Flat"
        elif not re.fullmatch(r"(OPQ|PCAR?|RR|L2norm|ITQ)[\d_,x]*", part):
            code = part
    return IndexKind(name, _code_bytes(name, code, dimensions), lists, links)


def stored_bytes(kind: IndexKind, count: int, dimensions: int) -> float:
    """Of an index as it was built, in memory or on disk."""
    per_vector = kind.code_bytes + kind.graph_bytes + (_LIST_ID if kind.lists else 0)
    return count * per_vector + 4.0 * kind.lists * dimensions


def building_bytes(kind: IndexKind, count: int, dimensions: int, *, block: int) -> float:
    """Peak memory of a build beyond the process itself and its encoder. `Flat` and `torch` are streamed from block to block."""
    streamed = 3.0 * block * dimensions * 4 + _COPIED
    if kind.name in ("Flat", "torch"):
        return streamed
    growth = _LIST_GROWTH if kind.lists else _GROWTH
    trains = kind.lists > 0 or kind.name != "SQfp16"
    sample = min(count, max(_TRAINING_ROWS, kind.lists * _TRAINING_ROWS_PER_LIST)) * dimensions * 4.0 if trains else 0.0
    return streamed + max(2 * sample, growth * stored_bytes(kind, count, dimensions))


def bm25_bytes(corpus_bytes: int) -> float:
    """Peak memory of building BM25, which is made in memory."""
    return _BM25_BYTES_PER_CORPUS_BYTE * corpus_bytes


def readable(size: float) -> str:
    """Bytes for a person: 64.6 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _code_bytes(name: str, code: str, dimensions: int) -> float:
    if code in _SCALAR_BITS:
        return _SCALAR_BITS[code] * dimensions / 8
    if found := re.fullmatch(r"PQ(\d+)(?:x(\d+))?(?:fs\w*|np)?", code):
        return int(found[1]) * int(found[2] or 8) / 8
    raise ConfigError(
        f"index: '{name}': the cost of '{code}' is not known here. Known: {', '.join(_SCALAR_BITS)}, PQ<m>, alone or behind "
        "IVF<n>, or HNSW<m>, torch."
    )
