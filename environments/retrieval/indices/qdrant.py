"""Retrieval with Qdrant: collections of a server, of an index folder (Qdrant's engine without a
server), and of qdrant-client's memory for one run.

The layout is the one that RLinf's builder makes: one unnamed vector, cosine, point id = row of the
corpus, payload = the record. Documents come from the payloads: no corpus file is needed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rlflow.components import check_options, takes
from rlflow.errors import ConfigError, DataError, install_command, needing
from rlflow.net.http import GaveUp, Retryable, RetryPolicy, check_status
from rlflow.values import PositiveFloat, PositiveInt
from rlflow_environments.common.jsonl import BadRow
from rlflow_environments.common.progress import StageProgress
from rlflow_environments.retrieval.corpus import Passage, passage_of
from rlflow_environments.retrieval.encoders import Encoder, NgramEncoder
from rlflow_environments.retrieval.errors import RetrievalError
from rlflow_environments.retrieval.indices.base import (
    Retriever,
    RetrieverFacts,
    check_top_k,
    with_facts,
)
from rlflow_environments.retrieval.indices.dense import OVERFETCH
from rlflow_environments.retrieval.indices.folder import (
    QDRANT,
    EncoderOption,
    encoder_of,
    open_folder,
    retriever_of,
    stored_encoder,
    verify_encoder,
)
from rlflow_environments.retrieval.indices.qdrant_edge import EdgeCollection

if TYPE_CHECKING:
    from qdrant_client.models import Record, ScoredPoint

HNSW_M, HNSW_EF_CONSTRUCT = 32, 512
_BATCH = 1024  # points stored at a time
_SAMPLED, _TOLD = 3, 32
_GREY_S = 60.0  # for the server to begin
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 8.0

T = TypeVar("T")


class Collection:
    """Points with one vector each, as qdrant-client describes them. Thread-safe."""

    def __init__(
        self,
        url: str | None,
        name: str,
        params: Mapping[str, Any] = MappingProxyType({}),
        *,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        tries: int = 5,
        create: int | None = None,
    ) -> None:
        """url: of a server; None: in this process's memory. params: of every query: hnsw_ef
        (candidates of the graph search), exact (scan instead), quantization (ignore, rescore,
        oversampling). create: dimensions of the collection to make where none of that name exists.

        Raises ConfigError: refused key, or a URL that is none; DataError: no such collection, or
        one of another layout; RetrievalError: the server does not answer."""
        with needing("retriever qdrant", install_command("qdrant")):
            from qdrant_client import QdrantClient, models
        place: dict[str, Any] = {"location": ":memory:"}
        if url is not None:
            place = {
                "url": url,
                "api_key": api_key or os.environ.get("QDRANT_API_KEY"),
                "timeout": max(1, round(timeout_s)),
                "check_compatibility": False,
            }
        try:
            client = QdrantClient(**place)
        except ValueError as problem:
            raise ConfigError(
                f"retriever qdrant.url: '{url}' ({problem}). Expected http(s)://host:port."
            ) from None
        self._client, self._name, self._where, self._tries = client, name, url or "memory", tries
        # In memory the client is not thread-safe
        self._lock = threading.Lock() if url is None else contextlib.nullcontext()
        self._params = models.SearchParams(**params)
        if create is not None and not self._call(client.collection_exists):
            self._call(
                client.create_collection,
                vectors_config=models.VectorParams(size=create, distance=models.Distance.COSINE),
                hnsw_config=models.HnswConfigDiff(m=HNSW_M, ef_construct=HNSW_EF_CONSTRUCT),
            )
        vectors = self._call(client.get_collection).config.params.vectors
        distance = getattr(vectors, "distance", None)
        if not hasattr(vectors, "size") or getattr(distance, "value", distance) != "Cosine":
            raise DataError(
                f"{self._where}, collection '{name}': expected one unnamed vector with cosine "
                f"distance, found {vectors}."
            )
        self.dimensions = int(vectors.size)

    def count(self) -> int:
        return int(self._call(self._client.count, exact=True).count)

    def query(self, vectors: np.ndarray, limit: int) -> list[list[ScoredPoint]]:
        """The nearest points of each of (B, D) vectors, with payloads, best first."""
        from qdrant_client import models

        asked = {"limit": limit, "params": self._params, "with_payload": True}
        requests = [models.QueryRequest(query=vector.tolist(), **asked) for vector in vectors]
        answers = self._call(self._client.query_batch_points, requests=requests)
        return [answer.points for answer in answers]

    def points(
        self, ids: Sequence[int], *, payloads: bool = True, vectors: bool = False
    ) -> list[Record]:
        """Those of the points that exist."""
        wanted = {"with_payload": payloads, "with_vectors": vectors}
        return self._call(self._client.retrieve, ids=list(ids), **wanted)

    def sample(self, count: int) -> list[Record]:
        """Some points, with vectors."""
        wanted = {"with_payload": True, "with_vectors": True}
        return self._call(self._client.scroll, limit=count, **wanted)[0]

    def upsert(
        self, ids: Sequence[int], vectors: np.ndarray, payloads: Sequence[Mapping[str, Any]]
    ) -> None:
        """Stores points; they are on disk when it returns."""
        from qdrant_client import models

        kept = [dict(payload) for payload in payloads]
        batch = models.Batch(ids=list(ids), vectors=vectors.tolist(), payloads=kept)
        self._call(self._client.upsert, points=batch, wait=True)

    def settle(self, report: StageProgress) -> None:
        """Waits for the index that the server builds by itself. Raises RetrievalError where that
        failed (red), or does not go on (grey)."""
        deadline = time.monotonic() + _GREY_S
        while (status := self._call(self._client.get_collection).status) != "green":
            if status == "yellow":
                deadline = time.monotonic() + _GREY_S
            elif status == "red" or time.monotonic() > deadline:
                raise RetrievalError(
                    f"{self._where}, collection '{self._name}': expected status green, found "
                    f"{getattr(status, 'value', status)}: its index is not built. Look into the "
                    "server's log, and give the command again."
                )
            report("indexing on the server", 0, 1)
            time.sleep(1.0)

    def _call(self, request: Callable[..., T], **arguments: Any) -> T:
        """What a request returns. Connection errors, timeouts, 429 and 5xx are tried again.

        Raises ConfigError: the key is refused; DataError: no such collection; RetrievalError: no
        answer after all tries."""
        from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

        where = f"{self._where}, collection '{self._name}'"

        def attempt() -> T:
            try:
                with self._lock:
                    return request(collection_name=self._name, **arguments)
            except UnexpectedResponse as error:
                status, reason = error.status_code or 500, error.reason_phrase
                if status in (401, 403):
                    raise ConfigError(
                        f"{self._where}: the key is refused ({status} {reason}). Set "
                        "retriever.api_key, or QDRANT_API_KEY."
                    ) from None
                if status == 404:
                    raise DataError(
                        f"{where}: there is none. Build it with `rlflow search build --index "
                        "qdrant`."
                    ) from None
                check_status("", status, error.headers, reason)
                raise RetrievalError(f"{where}: {status} {reason}.") from None
            except ResponseHandlingException as error:
                raise Retryable(str(error)) from None

        try:
            policy = RetryPolicy(self._tries, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            return policy.call(attempt, random.Random())
        except GaveUp as end:
            reason = " ".join(str(end.last).split())[:200]
            raise RetrievalError(
                f"{where}: no answer after {self._tries} tries ({reason})."
            ) from None


class QdrantRetriever(Retriever):
    """Passages of a collection, nearest first, ties by point id. Approximate where the collection
    has a graph or is quantized."""

    def __init__(self, encoder: Encoder, collection: Collection | EdgeCollection) -> None:
        """Raises DataError for an encoder of other dimensions."""
        if encoder.dimensions != collection.dimensions:
            raise DataError(
                f"retriever qdrant: the encoder makes {encoder.dimensions} dimensions, the "
                f"collection holds {collection.dimensions}. Give the encoder that it was built "
                "with."
            )
        self.encoder = encoder
        self.collection = collection

    @property
    def searched(self) -> dict[str, Any]:
        """What tells this collection from another: its size, its first payloads, and some spread
        over it where ids are rows."""
        count = self.collection.count()
        spread = self.collection.points([count * place // _TOLD for place in range(1, _TOLD)])
        payloads = {str(one.id): one.payload for one in [*self.collection.sample(_TOLD), *spread]}
        told = json.dumps(payloads, sort_keys=True, default=str).encode()
        return {"points": count, "sha256": hashlib.sha256(told).hexdigest()}

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """See Retriever. Raises RetrievalError where the server does not answer."""
        check_top_k(top_k)
        results: list[list[Passage]] = [[] for _ in queries]
        vectors = self.encoder.encode_queries(queries)
        places = np.flatnonzero(vectors.any(axis=1))
        found = self.collection.query(vectors[places], top_k + OVERFETCH) if len(places) else []
        for place, points in zip(places, found, strict=True):
            best = sorted(points, key=lambda point: (-point.score, point.id))[:top_k]
            results[place] = [passage_at(point) for point in best]
        return results


@with_facts(RetrieverFacts(package="qdrant_client", extra="qdrant", shared=False))
@takes(NgramEncoder)
def qdrant_retriever(
    corpus: Sequence[Passage] | None,
    *,
    path: str | None = None,
    url: str | None = None,
    collection: str = "default_collection",
    api_key: str | None = None,
    timeout_s: PositiveFloat = 60.0,
    tries: PositiveInt = 3,
    hnsw_ef: PositiveInt | None = None,
    exact: bool = False,
    quantization: Mapping[str, Any] | None = None,
    encoder: EncoderOption = None,
    verify: bool = True,
    **hashed: Any,
) -> Retriever:
    """A collection of an index folder (path) or of a server (url), or one made in memory from the
    corpus. hnsw_ef, exact, quantization: see Collection. verify: encode a few passages again and
    compare."""
    if path is not None and url is not None:
        raise ConfigError(
            "retriever qdrant: expected a path or a url, found both. Remove one of them."
        )
    if quantization is not None:
        where = "retriever qdrant.quantization"
        quantization = check_options(quantization, _quantization, where=where)
    params = {"hnsw_ef": hnsw_ef, "exact": exact, "quantization": quantization}
    if path is not None:
        return _open_index(Path(path).expanduser(), corpus, encoder, hashed, params)
    if corpus is None and (url is None or encoder is None):
        raise ConfigError(
            "retriever qdrant: expected url and the encoder that the collection was built with, a "
            "path, or a corpus."
        )
    made = encoder_of(encoder, hashed, corpus if corpus is not None else [])
    opened = Collection(
        url,
        collection,
        params,
        api_key=api_key,
        timeout_s=timeout_s,
        tries=tries,
        create=made.dimensions if url is None else None,
    )
    retriever = QdrantRetriever(made, opened)
    if url is None and corpus is not None:
        fill(opened, made, corpus, lambda stage, done, total: None)
        return retriever
    points = opened.sample(_SAMPLED)
    if not points:
        raise DataError(
            f"{url}: the collection '{collection}' is empty. Build it with `rlflow search build "
            "--index qdrant`."
        )
    if verify:
        _verify_points(f"{url}, collection '{collection}'", made, points)
    return retriever


def _open_index(
    folder: Path,
    corpus: Sequence[Passage] | None,
    encoder: EncoderOption,
    hashed: Mapping[str, Any],
    params: Mapping[str, Any],
) -> QdrantRetriever:
    """The collection of an index folder."""
    meta = open_folder(folder, corpus)
    if meta.kind != QDRANT:
        raise ConfigError(
            f"{folder}: an index of kind {meta.kind}, expected {QDRANT}. Set retriever.name to "
            f"{retriever_of(meta)}."
        )
    opened = stored_encoder(folder, meta, encoder, hashed)
    collection = EdgeCollection(folder / QDRANT, meta.dimensions, params)
    expected = meta.count if corpus is None else meta.count - len(getattr(corpus, "empty", ()))
    found = collection.count()
    if not found or (corpus is not None and found != expected):
        raise DataError(
            f"{folder}: the collection holds {found} points, expected {expected}. Build it again, "
            "or copy it again."
        )
    return QdrantRetriever(opened, collection)


def _quantization(
    *, ignore: bool = False, rescore: bool = False, oversampling: float = 1.0
) -> None:
    """Parameters of a search in a quantized collection."""


def fill(
    collection: Collection | EdgeCollection,
    encoder: Encoder,
    corpus: Sequence[Passage],
    report: StageProgress,
) -> int:
    """Encodes and stores the passages that are not there, under their rows, so that an ingest that
    was stopped goes on; returns how many those were. Rows without text have no point.

    Raises DataError: the collection holds points of another corpus or of another encoder."""
    added, empty = 0, getattr(corpus, "empty", frozenset())
    for start in range(0, len(corpus), _BATCH):
        report("storing points", start, len(corpus))
        rows = range(start, min(start + _BATCH, len(corpus)))
        there = {point.id for point in collection.points(rows, payloads=False)}
        if there:
            _compare(collection, encoder, corpus, min(there))
        missing = [row for row in rows if row not in there and row not in empty]
        if missing:
            payloads = [_record_of(corpus, row) for row in missing]
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


def _record_of(corpus: Sequence[Passage], row: int) -> dict[str, Any]:
    """The whole record of a row of a file, or a passage's fields where there is no file."""
    record = getattr(corpus, "record", None)
    return corpus[row].fields if record is None else record(row)


def _compare(
    collection: Collection | EdgeCollection,
    encoder: Encoder,
    corpus: Sequence[Passage],
    row: int,
) -> None:
    """Raises DataError where a stored point is not this row of the corpus, by this encoder."""
    (point,) = collection.points([row], vectors=True)
    if (point.payload or {}) != _record_of(corpus, row):
        raise DataError(
            f"point {row} of the collection is not row {row} of the corpus: it holds another "
            "corpus. Use another name."
        )
    _verify_points(f"point {row} of the collection", encoder, [point])


def _verify_points(where: str, encoder: Encoder, points: Sequence[Record]) -> None:
    """Raises DataError where stored vectors are not what the encoder makes of their payloads."""
    # By name, the unnamed one's empty, where a collection has sparse vectors too.
    vectors = [one.vector[""] if isinstance(one.vector, dict) else one.vector for one in points]
    stored = np.stack([np.asarray(vector, np.float32) for vector in vectors])
    verify_encoder(where, encoder, [passage_at(point) for point in points], stored)


def passage_at(point: Record | ScoredPoint) -> Passage:
    """The passage of a point, with its score if it was searched for. Raises DataError for a payload
    without text."""
    try:
        passage = passage_of(point.payload or {}, point.id)
        if not passage.contents:
            raise BadRow("expected text, found empty text")
    except BadRow as problem:
        raise DataError(f"point {point.id}: {problem}. Build the collection again.") from None
    return replace(passage, score=float(getattr(point, "score", 0.0)))
