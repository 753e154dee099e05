"""Fills Qdrant collections: idempotent, and resuming where an ingest was stopped, since a point's
id is its row of the corpus."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlflow.errors import DataError
from rlflow_environments.common.progress import StageProgress
from rlflow_environments.retrieval.corpus import Passage, make_passage
from rlflow_environments.retrieval.encoders import Encoder, NgramEncoder
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
from rlflow_environments.retrieval.indices.opening import verify_encoder
from rlflow_environments.retrieval.indices.qdrant_collections import (
    Collection,
    Point,
    open_embedded,
)

BATCH = 1024


def fill(
    collection: Collection, encoder: Encoder, corpus: Sequence[Passage], report: StageProgress
) -> int:
    """Encodes and stores the passages that are not there, under their rows; returns how many those
    were. Rows without text have no point.

    Raises DataError: the collection holds points of another corpus or of another encoder.
    """
    added, empty = 0, getattr(corpus, "empty", frozenset())
    for start in range(0, len(corpus), BATCH):
        report("storing points", start, len(corpus))
        rows = range(start, min(start + BATCH, len(corpus)))
        there = {point.id for point in collection.points(rows, payloads=False)}
        if there:
            _compare(collection, encoder, corpus, min(there))
        missing = [row for row in rows if row not in there and row not in empty]
        if missing:
            payloads = [record_of(corpus, row) for row in missing]
            vectors = encoder.encode_passages([corpus[row] for row in missing])
            collection.upsert(missing, vectors, payloads)
            added += len(missing)
    found, expected = collection.count(), len(corpus) - len(empty)
    if found != expected:
        raise DataError(
            f"the collection holds {found} points, the corpus {expected} passages: it holds others "
            "too. Use another name."
        )
    collection.settle(report)
    return added


def build_folder(
    corpus: Sequence[Passage], folder: Path, encoder: Encoder, engine: str, report: StageProgress
) -> None:
    """Makes an index folder with an embedded collection, which plain QdrantClient(path=folder /
    "storage") reads if it is of the engine local. One that is built is left alone; resumes where it
    was stopped."""
    kind = f"qdrant-{engine}"
    path = getattr(corpus, "path", None)
    stamp = {"path": "", "bytes": 0, "modified_ns": 0, "sha256": ""}
    if path is not None:
        stamp = stamp_corpus(path)
    if (folder / META).is_file():
        found = read_meta(folder)
        check_corpus(folder, found, corpus)
        check_encoder(folder, found, encoder.description)
        if found.kind != kind:
            raise DataError(
                f"{folder}: holds an index of kind {found.kind}. Give another folder, or delete it."
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    opened = open_embedded(engine, folder, encoder.dimensions, create=True)
    try:
        fill(opened, encoder, corpus, report)
    finally:
        opened.close()
    if isinstance(encoder, NgramEncoder):
        encoder.save(folder / ENCODER, stamp["sha256"])
    meta = IndexMeta(kind, "cosine", encoder.dimensions, len(corpus), stamp, encoder.description)
    write_meta(folder, meta)


def record_of(corpus: Sequence[Passage], row: int) -> dict[str, Any]:
    """The whole record of a row of a file, or a passage's fields where there is no file."""
    record = getattr(corpus, "record", None)
    return corpus[row].fields if record is None else record(row)


def verify_points(where: str, encoder: Encoder, points: Sequence[Point]) -> None:
    """Raises DataError where stored vectors are not what the encoder makes of their payloads."""
    passages = [make_passage(point.payload, point.id) for point in points]
    rows = range(len(points))
    verify_encoder(where, encoder, passages, lambda row, _: points[row].vector, rows)


def _compare(collection: Collection, encoder: Encoder, corpus: Sequence[Passage], row: int) -> None:
    """Raises DataError where a stored point is not this row of the corpus, by this encoder."""
    (point,) = collection.points([row], vectors=True)
    if dict(point.payload) != record_of(corpus, row):
        raise DataError(
            f"point {row} of the collection is not row {row} of the corpus: it holds another "
            "corpus. Use another name."
        )
    verify_points(f"point {row} of the collection", encoder, [point])
