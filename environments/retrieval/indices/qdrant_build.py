"""Filling Qdrant collections: idempotent, and resuming where an ingest was stopped, since a point's id is its row of the
corpus."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlflow.errors import DataError
from rlflow_environments.common.progress import StageProgress
from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.retrieval.encoders import Encoder, NgramEncoder
from rlflow_environments.retrieval.indices import qdrant_collections as collections
from rlflow_environments.retrieval.indices.folder import (
    ENCODER,
    META,
    IndexMeta,
    check_corpus,
    check_encoder,
    read_meta,
    stamp_corpus,
    write_meta,
)
from rlflow_environments.retrieval.indices.qdrant_layout import LOCAL_COLLECTION, SHARD, STORAGE, verify_points

BATCH = 1024


def fill(collection: collections.Collection, encoder: Encoder, corpus: Sequence[Passage], report: StageProgress) -> int:
    """Encodes and stores the passages that are not there, under their rows; returns how many those were. Rows without text have
    no point.

    Raises DataError: the collection holds points of another corpus or of another encoder.
    """
    added, empty = 0, getattr(corpus, "empty", frozenset())
    for start in range(0, len(corpus), BATCH):
        report("storing points", start, len(corpus))
        rows = range(start, min(start + BATCH, len(corpus)))
        there = collection.existing(rows)
        if there:
            _compare(collection, encoder, corpus, min(there))
        missing = [row for row in rows if row not in there and row not in empty]
        if missing:
            payloads = [record_of(corpus, row) for row in missing]
            collection.upsert(missing, encoder.encode_passages([corpus[row] for row in missing]), payloads)
            added += len(missing)
    found, expected = collection.count(), len(corpus) - len(empty)
    if found != expected:
        raise DataError(
            f"the collection holds {found} points, the corpus {expected} passages: it holds others too. Use another name."
        )
    collection.settle(report)
    return added


def build_folder(corpus: Sequence[Passage], folder: Path, encoder: Encoder, engine: str, report: StageProgress) -> IndexMeta:
    """An index folder with an embedded collection: `shard/` of qdrant-edge, or `storage/` of qdrant-client's local mode, which
    plain QdrantClient(path=folder / "storage") reads. Nothing is done where it is built already; resumes where it was stopped."""
    kind = f"qdrant-{engine}"
    path = getattr(corpus, "path", None)
    stamp = stamp_corpus(path) if path is not None else {"path": "", "bytes": 0, "modified_ns": 0, "sha256": ""}
    meta = IndexMeta(kind, "cosine", encoder.dimensions, len(corpus), stamp, encoder.description)
    if (folder / META).is_file():
        found = read_meta(folder)
        check_corpus(folder, found, corpus)
        check_encoder(folder, found, encoder.description)
        if found.kind != kind:
            raise DataError(f"{folder}: holds an index of kind {found.kind}. Give another folder, or delete it.")
        return found
    folder.mkdir(parents=True, exist_ok=True)
    opened: Any
    options = collections.SearchOptions()
    if engine == "edge":
        opened = collections.open_edge(folder / SHARD, encoder.dimensions, options=options, create=True)
    else:
        opened = collections.open_local(folder / STORAGE, LOCAL_COLLECTION, options=options, create=encoder.dimensions)
    try:
        fill(opened, encoder, corpus, report)
    finally:
        opened.close()
    if isinstance(encoder, NgramEncoder):
        encoder.save(folder / ENCODER, stamp["sha256"])
    return write_meta(folder, meta)


def record_of(corpus: Sequence[Passage], row: int) -> dict[str, Any]:
    """The whole record of a row as it stands in the file, or a passage's fields where there is no file."""
    record = getattr(corpus, "record", None)
    if record is not None:
        return record(row)
    passage = corpus[row]
    return {"id": passage.id, "title": passage.title, "contents": passage.contents, "url": passage.url}


def _compare(collection: collections.Collection, encoder: Encoder, corpus: Sequence[Passage], row: int) -> None:
    """Raises DataError where a stored point is not this row of the corpus, by this encoder."""
    (point,) = collection.points([row], vectors=True)
    if dict(point.payload) != record_of(corpus, row):
        raise DataError(
            f"point {row} of the collection is not row {row} of the corpus: it holds another corpus. Use another name."
        )
    verify_points(f"point {row} of the collection", encoder, [point])
