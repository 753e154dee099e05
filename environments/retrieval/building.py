"""Builds an index folder from a corpus, in stages that go on where a killed build stopped, in
memory that does not grow with the corpus until the index itself must be in memory."""

from __future__ import annotations

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
    read_json,
    read_meta,
    stamp_corpus,
    write_meta,
)
from rlflow_environments.retrieval.indices.recall import measure_recall, sample_queries

_COPIED = 32 << 20  # bytes of vectors moved at a time


@dataclass(frozen=True)
class BuildRequest:
    """What to build. kind: torch, bm25 or a faiss index_factory string. encoder: a name or name and
    options (not for bm25). dtype: of the embeddings file. keep_embeddings: beside a faiss index;
    kind torch always has them. checkpoint_s: seconds between copies of a growing index. recall: see
    measure_recall."""

    kind: str = "Flat"
    encoder: str | Mapping[str, Any] = "hashed"
    dtype: str = "float32"
    keep_embeddings: bool = False
    checkpoint_s: float = 600.0
    recall: float | None = None


def build_index(
    corpus: Sequence[Passage], folder: Path, request: BuildRequest, report: StageProgress
) -> IndexMeta:
    """Builds `folder` and returns what it holds; a folder that is built already is left alone, and
    a build that was killed goes on.

    corpus: of a file, with its `path`. Raises ConfigError, DataError: the folder holds something
    else, or its beginning; the disk is full.
    """
    if request.dtype not in EMBEDDINGS:
        raise ConfigError(
            f"dtype: expected one of {', '.join(EMBEDDINGS)}, found '{request.dtype}'."
        )
    if request.recall is not None and not 0 < request.recall <= 1:
        raise ConfigError(
            f"recall: expected a share above 0 and up to 1, found {request.recall:g}."
        )
    folder.mkdir(parents=True, exist_ok=True)
    report("hashing the corpus", 0, 1)
    stamp = stamp_corpus(corpus.path)  # type: ignore[attr-defined]
    if request.kind == "bm25":
        meta = IndexMeta("bm25", "bm25", 0, len(corpus), stamp)
        if not _is_built(folder, meta, corpus):
            _write_bm25(corpus, folder, report)
            write_meta(folder, meta)
        return read_meta(folder)
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
    if not _is_built(folder, meta, corpus):
        _DenseBuild(corpus, encoder, folder, request, report).run(meta)
    return read_meta(folder)


def _write_bm25(corpus: Sequence[Passage], folder: Path, report: StageProgress) -> None:
    from rlflow_environments.retrieval.indices.lexical import BM25Index

    def counted() -> Iterator[Passage]:
        for row in range(len(corpus)):
            if row % BLOCK == 0:
                report("counting words", row, len(corpus))
            yield corpus[row]

    index = BM25Index(counted())
    report("writing the index", 0, 1)
    shutil.rmtree(folder / BM25, ignore_errors=True)
    index.save(folder / BM25)


def _encoder(
    corpus: Sequence[Passage],
    folder: Path,
    request: BuildRequest,
    stamp: Mapping[str, Any],
    report: StageProgress,
) -> Encoder:
    """The encoder. A build of the same corpus leaves the word counts of the built-in one behind."""
    given = request.encoder
    component = {"name": given} if isinstance(given, str) else dict(given)
    if component.get("name") != "hashed":
        report("loading the encoder", 0, 1)
        return make_encoder(component)
    report("counting words", 0, 1)
    path = folder / ENCODER
    options = {key: value for key, value in component.items() if key != "name"}
    same = (stamp["sha256"], NgramEncoder([], **options).options)
    if path.is_file() and NgramEncoder.counted(path) == same:
        return NgramEncoder.load(path)
    encoder = make_encoder(component, corpus)
    # What is built already is compared with this encoder, not written over.
    if isinstance(encoder, NgramEncoder) and not (folder / META).is_file():
        encoder.save(path, stamp["sha256"])
    return encoder


def _is_built(folder: Path, meta: IndexMeta, corpus: Sequence[Passage]) -> bool:
    """Whether the folder holds this index. Raises DataError where it holds another one."""
    if not (folder / META).is_file():
        return False
    found = read_meta(folder)
    check_corpus(folder, found, corpus)
    same = all(
        getattr(found, key) == getattr(meta, key) for key in ("kind", "embeddings", "dimensions")
    )
    if not same or (found.encoder or {}).get("sha256") != (meta.encoder or {}).get("sha256"):
        raise DataError(
            f"{folder}: holds another index ({found.kind}, {found.dimensions} dimensions). Give "
            "another folder, or delete it."
        )
    return True


@dataclass(frozen=True)
class _DenseBuild:
    """A build of vectors, each stage of which finds what was done before."""

    corpus: Sequence[Passage]
    encoder: Encoder
    folder: Path
    request: BuildRequest
    report: StageProgress

    def run(self, meta: IndexMeta) -> None:
        """Encodes, fills the index, measures it; meta.json comes last."""
        kind, folder = self.request.kind, self.folder
        if kind != "torch":
            new_index(kind, self.encoder.dimensions)  # a mistake shows before hours of encoding
        self._begin(meta)
        embeddings = folder / EMBEDDINGS[self.request.dtype]
        vectors = self._encode(embeddings)
        if kind == "Flat":
            self._write_flat(vectors)
        elif kind != "torch":
            if not (folder / INDEX).is_file():
                self._fill(vectors)
            meta = replace(meta, search=self._measure(vectors))
        if meta.embeddings is not None:
            replace_file(vectors.path, embeddings)
        write_meta(folder, meta)
        for left in (vectors.path, folder / PROGRESS):
            left.unlink(missing_ok=True)
        clear_partials(folder)

    def _begin(self, meta: IndexMeta) -> None:
        """Notes what is built. Raises DataError where the beginning of something else is there."""
        wanted = {
            **asdict(meta),
            "corpus": meta.corpus["sha256"],
            "encoder": self.encoder.description["sha256"],
            "dtype": self.request.dtype,
        }
        path = self.folder / PROGRESS
        if path.is_file():
            found = read_json(path)["wanted"]
            differs = [key for key in wanted if found.get(key) != wanted[key]]
            if differs:
                raise DataError(
                    f"{self.folder}: an unfinished build of something else is here (other "
                    f"{', '.join(differs)}). Give another folder, or delete it."
                )
            return
        held = (INDEX, *EMBEDDINGS.values())
        strange = [name for name in held if (self.folder / name).exists()]
        if strange:
            raise DataError(
                f"{self.folder}: holds {', '.join(strange)} that no build here made. Give an empty "
                "folder."
            )
        write_json(path, {"wanted": wanted, "encoded": 0})

    def _encode(self, embeddings: Path) -> _Vectors:
        """Writes the vectors block by block; each is on disk before it is noted as done."""
        path, count = partial_path(embeddings), len(self.corpus)
        dtype = np.dtype(self.request.dtype).newbyteorder("<")
        row_bytes = self.encoder.dimensions * dtype.itemsize
        if embeddings.is_file():  # the last build was killed after its last step but one
            embeddings.replace(path)
        state = read_json(self.folder / PROGRESS)
        found = path.stat().st_size // row_bytes if path.is_file() else 0
        done = state["encoded"] if found >= state["encoded"] else found // BLOCK * BLOCK
        _check_space(path, (count - done) * row_bytes)
        with path.open("r+b" if path.is_file() else "w+b") as file:
            file.truncate(done * row_bytes)
            file.seek(0, os.SEEK_END)
            self.report("encoding", done, count)
            for start in range(done, count, BLOCK):
                vectors = self.encoder.encode_passages(self.corpus[start : start + BLOCK])
                file.write(vectors.astype(dtype, copy=False).data)
                file.flush()
                os.fsync(file.fileno())
                done = start + len(vectors)
                write_json(self.folder / PROGRESS, {**state, "encoded": done})
                self.report("encoding", done, count)
        return _Vectors(path, dtype, count, self.encoder.dimensions)

    def _write_flat(self, vectors: _Vectors) -> None:
        """The file that faiss would write for IndexFlatIP, without the index in memory."""
        path = self.folder / INDEX
        _check_space(path, 4 * vectors.count * vectors.dimensions)
        with replacing(path) as aside, aside.open("wb") as file:
            file.write(flat_header(vectors.count, vectors.dimensions))
            for block in self._copied(vectors, "writing the index"):
                file.write(block.astype("<f4", copy=False).data)

    def _fill(self, vectors: _Vectors) -> None:
        """Trains and fills an index in memory. A build that resumes reads its last copy back."""
        aside = partial_path(self.folder / INDEX)
        if aside.is_file():
            index = read_index(aside, mmap=False)
        else:
            index = new_index(self.request.kind, vectors.dimensions)
            if not index.is_trained:
                self.report("training the index", 0, 1)
                index.train(vectors.rows(training_rows(index, vectors.count)))
        saved = time.monotonic()
        for start, block in vectors.blocks(index.ntotal, BLOCK):
            self.report("filling the index", start, vectors.count)
            index.add(block)
            if time.monotonic() - saved > self.request.checkpoint_s:
                _save(index, aside)
                saved = time.monotonic()
        self.report("writing the index", 0, 1)
        _save(index, self.folder / INDEX)
        aside.unlink(missing_ok=True)

    def _measure(self, vectors: _Vectors) -> dict[str, Any] | None:
        """The recall of the index as written, against exact search of what it was filled with."""
        queries = self.encoder.encode_queries(sample_queries(self.corpus))
        index = read_index(self.folder / INDEX, mmap=True)
        exact = self._copied(vectors, "measuring recall")
        return measure_recall(index, queries, exact, self.request.recall)

    def _copied(self, vectors: _Vectors, stage: str) -> Iterator[np.ndarray]:
        for start, block in vectors.blocks(0, max(1, _COPIED // (4 * vectors.dimensions))):
            self.report(stage, start, vectors.count)
            yield block


@dataclass(frozen=True)
class _Vectors:
    """Vectors in a file, row after row: read, as mapped pages would count as the process's
    memory."""

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
                block = np.frombuffer(file.read(size * width), self.dtype)
                yield first, block.reshape(-1, self.dimensions).astype(np.float32, copy=False)

    def rows(self, rows: Sequence[int]) -> np.ndarray:
        """(len(rows), dimensions) float32."""
        mapped = np.memmap(self.path, self.dtype, "r", shape=(self.count, self.dimensions))
        return mapped[np.asarray(rows)].astype(np.float32)


def _check_space(path: Path, needed: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        raise DataError(
            f"{path}: needs {needed / 1e9:.1f} GB more, {free / 1e9:.1f} GB are free. Make room, "
            "or use dtype float16."
        )


def _save(index: Any, path: Path) -> None:
    with replacing(path) as aside:
        try:
            import_faiss().write_index(index, str(aside))
        except RuntimeError as problem:
            reason = str(problem).rpartition(": ")[2][:200]
            raise DataError(
                f"{path}: the index cannot be written ({reason}). Is the disk full?"
            ) from None
