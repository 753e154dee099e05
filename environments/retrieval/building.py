"""Building an index folder from a corpus: in stages that go on where a killed build stopped, with memory that does not grow
with the corpus until the index itself must be in memory."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlflow.errors import ConfigError, DataError
from rlflow.storage.files import clear_partials, partial_path, replace_file, replacing, write_json
from rlflow_environments.common.progress import StageProgress
from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.retrieval.encoders import Encoder, NgramEncoder, make_encoder
from rlflow_environments.retrieval.indices.dense import BLOCK, training_rows
from rlflow_environments.retrieval.indices.faiss_index import import_faiss, new_index, read_index
from rlflow_environments.retrieval.indices.folder import (
    BM25,
    EMBEDDINGS,
    ENCODER,
    INDEX,
    META,
    PROGRESS,
    IndexMeta,
    check_corpus,
    flat_header,
    read_meta,
    read_progress,
    stamp_corpus,
    write_meta,
)
from rlflow_environments.retrieval.indices.recall import measure_recall, sample_queries

logger = logging.getLogger(__name__)

_COPIED = 32 << 20  # bytes of vectors moved at a time


@dataclass(frozen=True)
class BuildRequest:
    """What to build. kind: torch, bm25 or a faiss index_factory string. encoder: a name or name and options (not for bm25).
    dtype: of the embeddings file. keep_embeddings: beside a faiss index; kind torch always has them. checkpoint_s: seconds
    between copies of a growing index. recall: see measure_recall."""

    kind: str = "Flat"
    encoder: str | Mapping[str, Any] = "hashed"
    dtype: str = "float32"
    keep_embeddings: bool = False
    bm25: Mapping[str, Any] | None = None
    checkpoint_s: float = 600.0
    recall: float | None = None


def build_index(corpus: Sequence[Passage], folder: Path, request: BuildRequest, report: StageProgress) -> IndexMeta:
    """Builds `folder` and returns what it holds; nothing is done where that is built already, and a build that was killed goes
    on.

    corpus: of a file, with its `path`.
    Raises ConfigError, DataError: the folder holds something else, or its beginning; the disk is full.
    """
    if request.dtype not in EMBEDDINGS:
        raise ConfigError(f"dtype: expected one of {', '.join(EMBEDDINGS)}, found '{request.dtype}'.")
    if request.recall is not None and not 0 < request.recall <= 1:
        raise ConfigError(f"recall: expected a share above 0 and up to 1, found {request.recall:g}.")
    folder.mkdir(parents=True, exist_ok=True)
    report("hashing the corpus", 0, 1)
    stamp = stamp_corpus(corpus.path)  # type: ignore[attr-defined]
    if request.kind == "bm25":
        return _build_bm25(corpus, stamp, folder, request, report)
    encoder = _encoder(corpus, folder, request, stamp, report)
    meta = IndexMeta(
        kind=request.kind,
        metric="cosine" if encoder.unit_vectors else "inner_product",
        dimensions=encoder.dimensions,
        count=len(corpus),
        corpus=stamp,
        encoder=encoder.description,
        embeddings=request.dtype if request.kind == "torch" or request.keep_embeddings else None,
    )
    if _is_built(folder, meta, corpus):
        return read_meta(folder)
    if request.kind != "torch":
        new_index(request.kind, encoder.dimensions)  # a mistake in the string shows now, not after hours of encoding
    _begin(folder, meta, request.dtype)
    vectors = _encode(corpus, encoder, folder, request, report)
    if request.kind == "Flat":
        _write_flat(vectors, folder / INDEX, report)
    elif request.kind != "torch" and not (folder / INDEX).is_file():
        _write_index(vectors, folder, request, report)
    if request.kind not in ("Flat", "torch"):
        meta = replace(meta, search=_measure(corpus, encoder, vectors, folder, request, report))
    embeddings = folder / EMBEDDINGS[request.dtype]
    if meta.embeddings is not None:
        replace_file(partial_path(embeddings), embeddings)
    meta = write_meta(folder, meta)
    for left in (partial_path(embeddings), folder / PROGRESS):
        left.unlink(missing_ok=True)
    clear_partials(folder)
    return meta


def _build_bm25(
    corpus: Sequence[Passage], stamp: Mapping[str, Any], folder: Path, request: BuildRequest, report: StageProgress
) -> IndexMeta:
    from rlflow_environments.retrieval.indices.lexical import BM25Index

    meta = IndexMeta("bm25", "bm25", 0, len(corpus), stamp)
    if _is_built(folder, meta, corpus):
        return read_meta(folder)
    report("counting words", 0, len(corpus))
    index = BM25Index(_counted(corpus, report), **(request.bm25 or {}))
    report("writing the index", 0, 1)
    shutil.rmtree(folder / BM25, ignore_errors=True)
    index.save(folder / BM25)
    return write_meta(folder, meta)


def _counted(corpus: Sequence[Passage], report: StageProgress) -> Iterator[Passage]:
    for row in range(len(corpus)):
        if row % BLOCK == 0:
            report("counting words", row, len(corpus))
        yield corpus[row]


def _encoder(
    corpus: Sequence[Passage], folder: Path, request: BuildRequest, stamp: Mapping[str, Any], report: StageProgress
) -> Encoder:
    """The encoder; the word counts of the built-in one are taken from the folder where a build of the same corpus left them."""
    component = {"name": request.encoder} if isinstance(request.encoder, str) else dict(request.encoder)
    if component.get("name") != "hashed":
        report("loading the encoder", 0, 1)
        return make_encoder(component)
    report("counting words", 0, 1)
    path = folder / ENCODER
    options = {key: value for key, value in component.items() if key != "name"}
    if path.is_file() and NgramEncoder.counted(path) == (stamp["sha256"], NgramEncoder([], **options).options):
        return NgramEncoder.load(path)
    encoder = make_encoder(component, corpus)
    if (
        isinstance(encoder, NgramEncoder) and not (folder / META).is_file()
    ):  # what is built is compared, not written over
        encoder.save(path, stamp["sha256"])
    return encoder


def _is_built(folder: Path, meta: IndexMeta, corpus: Sequence[Passage]) -> bool:
    """Whether the folder holds this index. Raises DataError where it holds another one."""
    if not (folder / META).is_file():
        return False
    found = read_meta(folder)
    check_corpus(folder, found, corpus)
    same = all(getattr(found, key) == getattr(meta, key) for key in ("kind", "embeddings", "dimensions"))
    if not same or (found.encoder or {}).get("sha256") != (meta.encoder or {}).get("sha256"):
        raise DataError(
            f"{folder}: holds another index ({found.kind}, {found.dimensions} dimensions). Give another folder, or delete it."
        )
    return True


def _begin(folder: Path, meta: IndexMeta, dtype: str) -> None:
    """Notes what is being built. Raises DataError where the folder holds the beginning of something else."""
    wanted = {
        **asdict(meta),
        "corpus": meta.corpus["sha256"],
        "encoder": (meta.encoder or {})["sha256"],
        "dtype": dtype,
    }
    path = folder / PROGRESS
    if not path.is_file():
        strange = [name for name in (INDEX, *EMBEDDINGS.values()) if (folder / name).exists()]
        if strange:
            raise DataError(f"{folder}: holds {', '.join(strange)} that no build here made. Give an empty folder.")
        write_json(path, {"wanted": wanted, "encoded": 0})
        return
    unfinished = read_progress(folder)["wanted"]
    differs = [key for key in wanted if unfinished.get(key) != wanted[key]]
    if differs:
        raise DataError(
            f"{folder}: an unfinished build of something else is here (other {', '.join(differs)}). Give another folder, or "
            "delete it."
        )


def _encode(
    corpus: Sequence[Passage], encoder: Encoder, folder: Path, request: BuildRequest, report: StageProgress
) -> _Vectors:
    """What is in the file that this writes, block by block; each is on disk before it is noted as done."""
    whole = folder / EMBEDDINGS[request.dtype]
    path, count, dtype = partial_path(whole), len(corpus), np.dtype(request.dtype).newbyteorder("<")
    row_bytes = encoder.dimensions * dtype.itemsize
    if whole.is_file():  # the last build was killed after its last step but one
        whole.replace(path)
    state = read_progress(folder)
    found = path.stat().st_size // row_bytes if path.is_file() else 0
    done = state["encoded"] if found >= state["encoded"] else found // BLOCK * BLOCK
    _check_space(path, (count - done) * row_bytes)
    with path.open("r+b" if path.is_file() else "w+b") as file:
        file.truncate(done * row_bytes)
        file.seek(0, os.SEEK_END)
        report("encoding", done, count)
        for start in range(done, count, BLOCK):
            vectors = encoder.encode_passages(corpus[start : start + BLOCK])
            file.write(vectors.astype(dtype, copy=False).data)
            file.flush()
            os.fsync(file.fileno())
            write_json(folder / PROGRESS, {**state, "encoded": start + len(vectors)})
            report("encoding", start + len(vectors), count)
    return _Vectors(path, dtype, count, encoder.dimensions)


def _check_space(path: Path, needed: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        raise DataError(
            f"{path}: needs {needed / 1e9:.1f} GB more, {free / 1e9:.1f} GB are free. Make room, or use dtype float16."
        )


@dataclass(frozen=True)
class _Vectors:
    """Vectors in a file, row after row. They are read and not mapped: mapped pages count as the process's memory."""

    path: Path
    dtype: np.dtype
    count: int
    dimensions: int

    def blocks(self, start: int, size: int) -> Iterator[tuple[int, np.ndarray]]:
        """(first row, (rows, dimensions) float32) of block after block from row `start`."""
        width = self.dimensions * self.dtype.itemsize
        with self.path.open("rb") as file:
            file.seek(start * width)
            for first in range(start, self.count, size):
                block = np.frombuffer(file.read(size * width), self.dtype).reshape(-1, self.dimensions)
                yield first, block.astype(np.float32, copy=False)

    def rows(self, rows: Sequence[int]) -> np.ndarray:
        """(len(rows), dimensions) float32."""
        mapped = np.memmap(self.path, self.dtype, "r", shape=(self.count, self.dimensions))
        return mapped[np.asarray(rows)].astype(np.float32)


def _write_flat(vectors: _Vectors, path: Path, report: StageProgress) -> None:
    """The file that faiss would write for IndexFlatIP, without the index in memory."""
    _check_space(path, 4 * vectors.count * vectors.dimensions)
    with replacing(path) as aside, aside.open("wb") as file:
        file.write(flat_header(vectors.count, vectors.dimensions))
        for start, block in vectors.blocks(0, max(1, _COPIED // (4 * vectors.dimensions))):
            report("writing the index", start, vectors.count)
            file.write(block.astype("<f4", copy=False).data)


def _write_index(vectors: _Vectors, folder: Path, request: BuildRequest, report: StageProgress) -> None:
    """Trains and fills an index in memory; a copy of it is written from time to time, and read back by a build that resumes."""
    faiss = import_faiss()
    aside = partial_path(folder / INDEX)
    if aside.is_file():
        index = read_index(aside, mmap=False)
    else:
        index = new_index(request.kind, vectors.dimensions)
        if not index.is_trained:
            report("training the index", 0, 1)
            index.train(vectors.rows(training_rows(index, vectors.count)))
    saved = time.monotonic()
    for start, block in vectors.blocks(index.ntotal, BLOCK):
        report("filling the index", start, vectors.count)
        index.add(block)
        if time.monotonic() - saved > request.checkpoint_s:
            _save(faiss, index, aside)
            saved = time.monotonic()
    report("writing the index", 0, 1)
    _save(faiss, index, folder / INDEX)
    aside.unlink(missing_ok=True)


def _measure(
    corpus: Sequence[Passage],
    encoder: Encoder,
    vectors: _Vectors,
    folder: Path,
    request: BuildRequest,
    report: StageProgress,
) -> dict[str, Any] | None:
    """The recall of the index that was written, against exact search of what it was filled with."""

    def exact() -> Iterator[np.ndarray]:
        for start, block in vectors.blocks(0, max(1, _COPIED // (4 * vectors.dimensions))):
            report("measuring recall", start, vectors.count)
            yield block

    queries = encoder.encode_queries(sample_queries(corpus))
    return measure_recall(read_index(folder / INDEX, mmap=True), queries, exact, request.recall)


def _save(faiss: Any, index: Any, path: Path) -> None:
    with replacing(path) as aside:
        try:
            faiss.write_index(index, str(aside))
        except RuntimeError as problem:
            reason = str(problem).rpartition(": ")[2][:200]
            raise DataError(f"{path}: the index cannot be written ({reason}). Is the disk full?") from None
