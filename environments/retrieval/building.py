"""Builds an index folder from a corpus: resumes where a killed build stopped, in memory that does
not grow with the corpus until the index itself must be in memory."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from rlflow.errors import ConfigError, DataError
from rlflow.storage.files import clear_partials, partial_path, replace_file, replacing, write_json
from rlflow_environments.common.progress import StageProgress
from rlflow_environments.common.text import load_json
from rlflow_environments.retrieval.corpus import Corpus, Passage
from rlflow_environments.retrieval.encoders import Encoder, NgramEncoder, make_encoder
from rlflow_environments.retrieval.indices.dense import BLOCK, training_rows
from rlflow_environments.retrieval.indices.faiss_index import (
    measure_recall,
    new_index,
    read_index,
    sample_queries,
    write_index,
)
from rlflow_environments.retrieval.indices.folder import (
    BM25,
    ENCODER,
    INDEX,
    META,
    PROGRESS,
    QDRANT,
    IndexMeta,
    check_corpus,
    read_meta,
    write_meta,
)

logger = logging.getLogger(__name__)

_COMPARED = 32 << 20  # bytes of vectors that recall is measured on at a time
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


@dataclass(frozen=True)
class BuildRequest:
    """kind: bm25, qdrant or a faiss index_factory string. encoder: a name or name and options (not for
    bm25). recall: see measure_recall."""

    kind: str = "Flat"
    encoder: str | Mapping[str, Any] = "hashed"
    recall: float | None = None


def build_index(
    corpus: Corpus, folder: Path, request: BuildRequest, report: StageProgress
) -> IndexMeta:
    """Builds `folder` and returns what it holds; a folder that is built already is left alone, and
    a build that was killed goes on. Raises ConfigError, DataError: the folder holds something else,
    or its beginning; the disk is full."""
    if request.recall is not None and not 0 < request.recall <= 1:
        raise ConfigError(
            f"recall: expected a share above 0 and up to 1, found {request.recall:g}."
        )
    folder.mkdir(parents=True, exist_ok=True)
    file = corpus.path.resolve()
    stamp = {"path": str(file), "bytes": file.stat().st_size, "sha256": corpus.sha256}
    if request.kind == "bm25":
        meta = IndexMeta("bm25", 0, len(corpus), stamp)
        if not _is_built(folder, meta, corpus):
            _write_bm25(corpus, folder, report)
            write_meta(folder, meta)
        return read_meta(folder)
    encoder = _encoder(corpus, folder, request, report)
    meta = IndexMeta(request.kind, encoder.dimensions, len(corpus), stamp, encoder.description)
    if _is_built(folder, meta, corpus):
        return read_meta(folder)
    if request.kind == QDRANT:
        _fill_qdrant(corpus, encoder, folder, report)
        write_meta(folder, meta)
    else:
        _DenseBuild(corpus, encoder, folder, request, report).run(meta)
    return read_meta(folder)


def _write_bm25(corpus: Corpus, folder: Path, report: StageProgress) -> None:
    from rlflow_environments.retrieval.indices.lexical import BM25Index

    def counted() -> Iterator[Passage]:
        for row, passage in enumerate(corpus):
            if row % BLOCK == 0:
                report("counting words", row, len(corpus))
            yield passage

    index = BM25Index(counted())
    report("writing the index", 0, 1)
    shutil.rmtree(folder / BM25, ignore_errors=True)
    index.save(folder / BM25)


def _fill_qdrant(corpus: Corpus, encoder: Encoder, folder: Path, report: StageProgress) -> None:
    """Fills a collection of Qdrant's engine; one that was stopped goes on."""
    from rlflow_environments.retrieval.indices import qdrant
    from rlflow_environments.retrieval.indices.qdrant_edge import EdgeCollection, Graph

    graph = Graph(qdrant.HNSW_M, qdrant.HNSW_EF_CONSTRUCT)
    collection = EdgeCollection(folder / QDRANT, encoder.dimensions, create=graph)
    qdrant.fill(collection, encoder, corpus, report)


def _encoder(corpus: Corpus, folder: Path, request: BuildRequest, report: StageProgress) -> Encoder:
    """The encoder. A build of the same corpus leaves the word counts of the built-in one behind."""
    given, path = request.encoder, folder / ENCODER
    component = {"name": given} if isinstance(given, str) else dict(given)
    if component.get("name") != "hashed":
        report("loading the encoder", 0, 1)
        return make_encoder(component)
    report("counting words", 0, 1)
    options = {key: value for key, value in component.items() if key != "name"}
    if path.is_file():
        kept = NgramEncoder.load(path)
        if (kept.corpus, kept.options) == (corpus.sha256, NgramEncoder([], **options).options):
            return kept
    encoder = NgramEncoder(corpus, **options)
    if not (folder / META).is_file():  # what is built already is compared, not written over
        encoder.save(path, corpus.sha256)
    return encoder


def _is_built(folder: Path, meta: IndexMeta, corpus: Corpus) -> bool:
    """Whether the folder holds this index. Raises DataError where it holds another one."""
    if not (folder / META).is_file():
        return False
    found = read_meta(folder)
    check_corpus(folder, found, corpus)
    encoders = [(one.encoder or {}).get("sha256") for one in (found, meta)]
    if found.kind != meta.kind or encoders[0] != encoders[1]:
        raise DataError(
            f"{folder}: holds another index ({found.kind}, {found.dimensions} dimensions). Give "
            "another folder, or delete it."
        )
    return True


@dataclass(frozen=True)
class _DenseBuild:
    """A build of vectors, each stage of which finds what was done before."""

    corpus: Corpus
    encoder: Encoder
    folder: Path
    request: BuildRequest
    report: StageProgress

    @property
    def vectors(self) -> Path:
        """The vectors, row after row, as faiss' file of a flat index."""
        return partial_path(self.folder / "vectors")

    def run(self, meta: IndexMeta) -> None:
        """Encodes, fills the index, measures it; meta.json comes last."""
        built, progress = self.folder / INDEX, self.folder / PROGRESS
        index = new_index(meta.kind, meta.dimensions)  # a typo shows before hours of encoding
        self._begin(meta, progress)
        if meta.kind == "Flat" and built.is_file():  # stopped after the last step but one
            built.replace(self.vectors)
        self._encode(progress)
        if meta.kind == "Flat":
            replace_file(self.vectors, built)
        else:
            if not built.is_file():
                self._fill(index, built)
            meta = replace(meta, search=self._measure(built))
        write_meta(self.folder, meta)
        self.vectors.unlink(missing_ok=True)
        progress.unlink()
        clear_partials(self.folder)

    def _begin(self, meta: IndexMeta, path: Path) -> None:
        """Notes what is built. Raises DataError where the beginning of something else is there."""
        corpus, encoder = meta.corpus["sha256"], self.encoder.description["sha256"]
        wanted = {**asdict(meta), "corpus": corpus, "encoder": encoder}
        if path.is_file():
            found = _read(path)["wanted"]
            differs = [key for key in wanted if found.get(key) != wanted[key]]
            if differs:
                raise DataError(
                    f"{self.folder}: an unfinished build of something else is here (other "
                    f"{', '.join(differs)}). Give another folder, or delete it."
                )
            return
        if (self.folder / INDEX).exists():
            raise DataError(
                f"{self.folder}: holds {INDEX} that no build here made. Give an empty folder."
            )
        write_json(path, {"wanted": wanted, "encoded": 0})

    def _encode(self, progress: Path) -> None:
        """Writes the vectors block by block; each is on disk before it is noted as done."""
        path, count, dimensions = self.vectors, len(self.corpus), self.encoder.dimensions
        begin, width = _FLAT_HEADER.itemsize, 4 * dimensions
        state = _read(progress)
        found = max(0, path.stat().st_size - begin) // width if path.is_file() else 0
        done = state["encoded"] if found >= state["encoded"] else found // BLOCK * BLOCK
        free = shutil.disk_usage(self.folder).free
        if (needed := (count - done) * width) > free:
            raise DataError(
                f"{path}: needs {needed / 1e9:.1f} GB more, {free / 1e9:.1f} GB are free. Make "
                "room."
            )
        header = (b"IxFI", dimensions, count, [1 << 20] * 2, True, 0, count * dimensions)
        with path.open("r+b" if path.is_file() else "w+b") as file:
            file.write(np.array(header, _FLAT_HEADER).tobytes())
            file.truncate(begin + done * width)
            file.seek(0, os.SEEK_END)
            self.report("encoding", done, count)
            for start in range(done, count, BLOCK):
                vectors = self.encoder.encode_passages(self.corpus[start : start + BLOCK])
                file.write(vectors.astype("<f4", copy=False).data)
                file.flush()
                os.fsync(file.fileno())
                done = start + len(vectors)
                write_json(progress, {**state, "encoded": done})
                self.report("encoding", done, count)

    def _fill(self, index: Any, path: Path) -> None:
        """Trains and fills an index in memory, and writes it."""
        count = len(self.corpus)
        needed, free = 2.0 * count * _code_size(index), psutil.virtual_memory().available
        if needed > free:  # a vector that grows is there twice
            logger.warning(
                "%s may need %.1f GB of memory, %.1f GB are free: SQ8 takes a quarter of Flat, "
                "and Flat is built in a few hundred megabytes",
                self.request.kind,
                needed / 1e9,
                free / 1e9,
            )
        if not index.is_trained:
            self.report("training the index", 0, 1)
            shape = (count, self.encoder.dimensions)
            mapped = np.memmap(self.vectors, "<f4", "r", _FLAT_HEADER.itemsize, shape)
            index.train(mapped[training_rows(index, count)])
        for block in self._blocks("filling the index", BLOCK):
            index.add(block)
        self.report("writing the index", 0, 1)
        with replacing(path) as aside:
            write_index(index, aside)

    def _measure(self, path: Path) -> dict[str, Any] | None:
        """The recall of the index as written, against exact search of what it was filled with."""
        queries = self.encoder.encode_queries(sample_queries(self.corpus))
        size = max(1, _COMPARED // (4 * self.encoder.dimensions))
        exact = self._blocks("measuring recall", size)
        return measure_recall(read_index(path, mmap=True), queries, exact, self.request.recall)

    def _blocks(self, stage: str, size: int) -> Iterator[np.ndarray]:
        """(rows, dimensions) float32, read: mapped pages would count as the process's memory."""
        with self.vectors.open("rb") as file:
            file.seek(_FLAT_HEADER.itemsize)
            for start in range(0, len(self.corpus), size):
                self.report(stage, start, len(self.corpus))
                block = np.fromfile(file, "<f4", size * self.encoder.dimensions)
                yield block.reshape(-1, self.encoder.dimensions)


def _code_size(index: Any) -> float:
    """Bytes that an index keeps of a vector, about."""
    try:
        return float(index.sa_code_size())
    except RuntimeError:  # of kinds that faiss gives no size for
        return 4.0 * index.d


def _read(path: Path) -> Any:
    """What a build that is under way notes. Raises DataError."""
    try:
        return load_json(path.read_bytes())
    except (OSError, ValueError, RecursionError) as problem:
        raise DataError(
            f"{path}: cannot be read ({problem}). Delete the folder and build again."
        ) from None
