"""An index on disk: one folder, and meta.json that says what it holds.

meta.json                    kind, metric, dimensions, count, corpus (path, size, SHA-256), encoder (family, SHA-256, rules)
index.faiss                  of every faiss kind (Flat, SQ8, IVF1024,SQ8, HNSW32, ...)
embeddings.f32 | .f16        (count, dimensions) row after row, no header; row = row of the corpus. Kind `torch` is this file
encoder.json                 word counts of the built-in encoder
bm25/                        of kind `bm25`
progress.json, *.partial     while a build is under way
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlflow.errors import DataError
from rlflow.storage.files import write_json
from rlflow_environments.common.text import load_json
from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.retrieval.indices.contents import check_files, sample_digest, stamp_file

META, INDEX, ENCODER, BM25, PROGRESS = (
    "meta.json",
    "index.faiss",
    "encoder.json",
    "bm25",
    "progress.json",
)
EMBEDDINGS = {"float32": "embeddings.f32", "float16": "embeddings.f16"}
METRICS = ("cosine", "inner_product", "bm25")
ENCODER_RULES = (
    "family",
    "pooling",
    "normalize",
    "query_prefix",
    "passage_prefix",
    "max_length",
)
"""What an encoder other than the built-in one is made again from, beside its path."""
FORMAT = 1
_FLAT_HEADER = np.dtype(
    [
        ("name", "S4"),
        ("dimensions", "<i4"),
        ("count", "<i8"),
        ("unused", "<i8", 2),
        ("trained", "?"),
        ("metric", "<i4"),
        ("size", "<u8"),
    ]
)
"""How a file of IndexFlatIP begins (faiss/impl/index_write.cpp); the vectors follow as float32."""
_INNER_PRODUCT = 0


@dataclass(frozen=True)
class IndexMeta:
    """What an index folder holds.

    kind: torch, bm25, qdrant-edge, qdrant-local, or a faiss index_factory string. metric: cosine
    (unit vectors), inner_product or bm25. corpus: path, bytes, modified_ns, sha256 and sample of
    the file. encoder: its description, None for bm25. embeddings: the dtype of the embeddings file,
    None without one. files: {name: bytes, sha256, sample} of the folder's files; None for
    databases. search: of IVF and HNSW, `nprobe` or `ef_search` to search with, the `target` of
    recall@10 that it was chosen for, how many `queries` measured it, and `recall` by value; None
    where nothing was measured."""

    kind: str
    metric: str
    dimensions: int
    count: int
    corpus: Mapping[str, Any]
    encoder: Mapping[str, Any] | None = None
    embeddings: str | None = None
    files: Mapping[str, Any] | None = None
    search: Mapping[str, Any] | None = None
    format: int = FORMAT


def read_meta(folder: Path) -> IndexMeta:
    """What meta.json says. Raises DataError: no index, an unfinished or damaged one, a later
    format."""
    path = folder / META
    if not path.is_file():
        unfinished = any(folder.glob("*.partial")) or (folder / PROGRESS).is_file()
        found = "no meta.json"
        if unfinished:
            found = "a build that did not finish; run it again to go on"
        raise DataError(
            f"{folder}: expected an index made by `rlflow search build`, found {found}."
        )
    try:
        meta = IndexMeta(**load_json(path.read_bytes()))
        _check_types(meta)
        asdict(meta)  # as everything that shows it does: not for what is nested too deeply
    except (ValueError, TypeError, KeyError, RecursionError) as problem:
        reason = str(problem)[:200]
        raise DataError(f"{path}: cannot be read ({reason}). Build the index again.") from None
    if meta.format != FORMAT:
        raise DataError(
            f"{path}: format {meta.format}; this version reads format {FORMAT}. Build the index "
            "again."
        )
    return meta


def _check_types(meta: IndexMeta) -> None:
    """Raises ValueError, TypeError or KeyError for what no build writes."""
    numbers = (meta.dimensions, meta.count, meta.corpus["bytes"], meta.corpus["modified_ns"])
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"expected numbers of 0 or more, found {numbers}")
    texts = [meta.kind, meta.metric, meta.corpus["path"], meta.corpus["sha256"]]
    if meta.encoder is not None:
        texts += [meta.encoder["family"], meta.encoder["sha256"]]
        if meta.encoder["family"] != "hashed":
            texts += [meta.encoder["path"]]
            missing = [rule for rule in ENCODER_RULES if rule not in meta.encoder]
            if missing:
                raise ValueError(f"encoder: {missing[0]} is missing")
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("expected texts for kind, metric, paths, family and hashes")
    files = meta.files or {}
    if not isinstance(files, dict) or not all(isinstance(stamp, dict) for stamp in files.values()):
        raise ValueError("expected hashes by file under files")
    if meta.metric not in METRICS:
        raise ValueError(f"metric: expected one of {', '.join(METRICS)}, found {meta.metric!r}")
    if meta.embeddings is not None and meta.embeddings not in EMBEDDINGS:
        known = ", ".join(EMBEDDINGS)
        raise ValueError(f"embeddings: expected one of {known}, found {meta.embeddings!r}")
    if meta.search is not None:
        _check_search(meta.search)


def _check_search(search: Mapping[str, Any]) -> None:
    """Raises ValueError, TypeError or KeyError for a measured recall that no build writes."""
    (chosen,) = [search[name] for name in ("nprobe", "ef_search") if name in search]
    numbers = [chosen, search["queries"], *map(int, search["recall"])]
    shares = [search["target"], *search["recall"].values()]
    if not search["recall"] or not all(type(one) is int and one >= 1 for one in numbers):
        raise ValueError(
            "search: expected whole numbers from 1 on for nprobe or ef_search, queries, and under "
            "recall"
        )
    if not all(isinstance(share, (int, float)) and 0 <= share <= 1 for share in shares):
        raise ValueError("search: expected target and recalls between 0 and 1")


def write_meta(folder: Path, meta: IndexMeta) -> None:
    """Writes meta.json with the hashes of the files: the last step, a folder that has it is
    whole."""
    files = None
    if not meta.kind.startswith("qdrant"):  # a database changes its files
        names = (INDEX, ENCODER, *EMBEDDINGS.values())
        held = [*(folder / name for name in names), *(folder / BM25).rglob("*")]
        files = {
            str(path.relative_to(folder)): stamp_file(path)
            for path in sorted(held)
            if path.is_file()
        }
    write_json(folder / META, asdict(replace(meta, files=files)))


def check_folder(folder: Path, meta: IndexMeta, *, deep: bool = False) -> None:
    """Raises DataError where a file is not that of the build; by samples, or wholly with `deep`."""
    check_files(folder, meta.files or {}, deep=deep)


def read_json(path: Path) -> Any:
    """The content of a file that a build keeps while it is under way. Raises DataError."""
    try:
        return load_json(path.read_bytes())
    except (OSError, ValueError, RecursionError) as problem:
        raise DataError(
            f"{path}: cannot be read ({problem}). Delete the folder and build again."
        ) from None


def stamp_corpus(path: str | Path) -> dict[str, Any]:
    """{path, bytes, modified_ns, sha256, sample} of a corpus file."""
    file = Path(path).resolve()
    return {"path": str(file), "modified_ns": file.stat().st_mtime_ns, **stamp_file(file)}


def check_corpus(folder: Path, meta: IndexMeta, corpus: Sequence[Passage]) -> None:
    """Raises DataError where the index was built on another corpus. Of a file that has not changed
    since then only samples are read."""
    built = meta.corpus
    if len(corpus) != meta.count:
        raise DataError(
            f"{folder}: the index holds {meta.count} passages, the corpus {len(corpus)}. It was "
            f"built on another corpus ({built['path']}); build it again."
        )
    path = getattr(corpus, "path", None)
    if path is None:
        return
    file = Path(path).resolve()
    state = file.stat()
    if state.st_size == built["bytes"]:
        same_file = (str(file), state.st_mtime_ns) == (built["path"], built["modified_ns"])
        if same_file and built.get("sample") in (None, sample_digest(file)):
            return
        if stamp_corpus(file)["sha256"] == built["sha256"]:
            return
    raise DataError(
        f"{folder}: built on another corpus than {path} (SHA-256 {built['sha256'][:12]}..., "
        f"{built['bytes']} bytes, then at {built['path']}). Give that corpus, or build the index "
        "again."
    )


def check_encoder(folder: Path, meta: IndexMeta, description: Mapping[str, Any]) -> None:
    """Raises DataError where the vectors came from another encoder, or from other rules."""
    built = meta.encoder or {}
    if built.get("sha256") == description["sha256"]:
        return
    keys = [
        key for key in built if key not in ("sha256", "path") and built[key] != description.get(key)
    ]
    differs = "; ".join(f"{key}: {built[key]!r} then, {description.get(key)!r} now" for key in keys)
    raise DataError(
        f"{folder}: built with another encoder ({differs or 'the same rules, other weights'}; "
        f"family {built.get('family')}, SHA-256 {str(built.get('sha256'))[:12]}... then, "
        f"{description['sha256'][:12]}... now). Give that encoder, or build the index again."
    )


def open_embeddings(folder: Path, meta: IndexMeta) -> np.ndarray | None:
    """(count, dimensions) mapped from the embeddings file, else from a flat index file; None where
    neither is there. Raises DataError: the file's size does not fit."""
    if meta.embeddings is None:
        return open_flat_file(folder / INDEX) if meta.kind == "Flat" else None
    path = folder / EMBEDDINGS[meta.embeddings]
    dtype = np.dtype(meta.embeddings).newbyteorder("<")
    expected = meta.count * meta.dimensions * dtype.itemsize
    found = path.stat().st_size if path.is_file() else 0
    if found != expected:
        raise DataError(f"{path}: expected {expected} bytes, found {found}. Build the index again.")
    return np.memmap(path, dtype, "r", shape=(meta.count, meta.dimensions))


def open_flat_file(path: Path) -> np.ndarray:
    """(count, dimensions) float32 mapped from a file of IndexFlatIP. Raises DataError for
    another."""
    found = np.fromfile(path, _FLAT_HEADER, count=1)
    if len(found):
        name, dimensions, count, _, _, metric, size = found[0].tolist()
        whole = path.stat().st_size == _FLAT_HEADER.itemsize + 4 * count * dimensions
        if name == b"IxFI" and metric == _INNER_PRODUCT and size == count * dimensions and whole:
            return np.memmap(path, "<f4", "r", _FLAT_HEADER.itemsize, (count, dimensions))
    raise DataError(
        f"{path}: expected a whole flat faiss index with inner products, found something else."
    )


def flat_header(count: int, dimensions: int) -> bytes:
    """How the file of a flat index with so many vectors begins."""
    size = count * dimensions
    header = (b"IxFI", dimensions, count, [1 << 20] * 2, True, _INNER_PRODUCT, size)
    return np.array(header, _FLAT_HEADER).tobytes()
