"""Qdrant collections: of a server, of qdrant-client's local mode, and of the engine embedded in this process (qdrant-edge).

The layout is the one that RLinf's builder makes: one unnamed vector, cosine, point id = row of the corpus, payload = the record.
"""

from __future__ import annotations

import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from rlflow.components import check_options
from rlflow.errors import ConfigError, DataError, install_command, needing
from rlflow.http import GaveUp, Retryable, RetryPolicy, check_status
from rlflow_environments.common.progress import StageProgress
from rlflow_environments.retrieval.errors import RetrievalError

HNSW_M, HNSW_EF_CONSTRUCT = 32, 512
_FULL_SCAN_KB = 10_000  # Qdrant's default: smaller segments are scanned
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 8.0

T = TypeVar("T")


@dataclass(frozen=True)
class Point:
    """A stored point. score: of a search, 0 otherwise. vector: where it was asked for."""

    id: int
    payload: Mapping[str, Any]
    score: float = 0.0
    vector: np.ndarray | None = None


@dataclass(frozen=True)
class SearchOptions:
    """Parameters of every query. hnsw_ef: candidates of the graph search. exact: scan instead. quantization: ignore, rescore,
    oversampling, where the collection is quantized."""

    hnsw_ef: int | None = None
    exact: bool = False
    quantization: Mapping[str, Any] | None = None


class Collection(Protocol):
    """Points with one vector each. Thread-safe."""

    dimensions: int

    def count(self) -> int: ...

    def query(self, vectors: np.ndarray, limit: int) -> list[list[Point]]:
        """The nearest points of each of (B, dimensions) vectors, with payloads, best first."""

    def points(self, ids: Sequence[int], *, vectors: bool = False) -> list[Point]:
        """Those of the points that exist."""

    def sample(self, count: int) -> list[Point]:
        """Some points, with vectors."""

    def existing(self, ids: Sequence[int]) -> set[int]: ...

    def upsert(self, ids: Sequence[int], vectors: np.ndarray, payloads: Sequence[Mapping[str, Any]]) -> None: ...

    def settle(self, report: StageProgress) -> None:
        """Builds what speeds up searches, and waits for it."""

    def close(self) -> None: ...


class ClientCollection:
    """A collection behind qdrant-client: of a server (REST or gRPC), or of its local mode in a folder or in memory."""

    def __init__(self, client: Any, name: str, where: str, *, options: SearchOptions, tries: int, lock: bool) -> None:
        """lock: local mode, which is not thread-safe. Raises DataError: no such collection, or one of another layout."""
        self._client, self._name, self._where, self._tries = client, name, where, tries
        self._params = _search_params(options)
        self._lock = threading.Lock() if lock else None
        info = self._call(lambda: client.get_collection(name))
        vectors = info.config.params.vectors
        if not hasattr(vectors, "size") or str(getattr(vectors.distance, "value", vectors.distance)) != "Cosine":
            raise DataError(
                f"{where}, collection '{name}': expected one unnamed vector with cosine distance, found {vectors}."
            )
        self.dimensions = int(vectors.size)

    def count(self) -> int:
        """See Collection."""
        return int(self._call(lambda: self._client.count(self._name, exact=True)).count)

    def query(self, vectors: np.ndarray, limit: int) -> list[list[Point]]:
        """See Collection."""
        from qdrant_client import models

        requests = [
            models.QueryRequest(query=vector.tolist(), limit=limit, params=self._params, with_payload=True)
            for vector in vectors
        ]
        answers = self._call(lambda: self._client.query_batch_points(self._name, requests))
        return [
            [Point(point.id, point.payload or {}, float(point.score)) for point in answer.points] for answer in answers
        ]

    def points(self, ids: Sequence[int], *, vectors: bool = False) -> list[Point]:
        """See Collection."""
        found = self._call(
            lambda: self._client.retrieve(self._name, list(ids), with_payload=True, with_vectors=vectors)
        )
        return [_point(point) for point in found]

    def sample(self, count: int) -> list[Point]:
        """See Collection."""
        found, _ = self._call(
            lambda: self._client.scroll(self._name, limit=count, with_payload=True, with_vectors=True)
        )
        return [_point(point) for point in found]

    def existing(self, ids: Sequence[int]) -> set[int]:
        """See Collection."""
        found = self._call(lambda: self._client.retrieve(self._name, list(ids), with_payload=False, with_vectors=False))
        return {point.id for point in found}

    def upsert(self, ids: Sequence[int], vectors: np.ndarray, payloads: Sequence[Mapping[str, Any]]) -> None:
        """See Collection."""
        from qdrant_client import models

        batch = models.Batch(ids=list(ids), vectors=vectors.tolist(), payloads=[dict(payload) for payload in payloads])
        self._call(lambda: self._client.upsert(self._name, batch, wait=True))

    def settle(self, report: StageProgress) -> None:
        """See Collection. A server optimizes by itself."""
        while (
            str(getattr(status := self._call(lambda: self._client.get_collection(self._name)).status, "value", status))
            != "green"
        ):
            report("indexing on the server", 0, 1)
            time.sleep(1.0)

    def close(self) -> None:
        """Closes the connection or of the folder."""
        self._client.close()

    def _call(self, request: Callable[[], T]) -> T:
        if self._lock is None:
            return call(request, self._where, self._name, self._tries)
        with self._lock:
            return call(request, self._where, self._name, self._tries)


class EdgeCollection:
    """A shard of the embedded engine. Its folder belongs to one process."""

    def __init__(self, shard: Any, dimensions: int, *, options: SearchOptions) -> None:
        import qdrant_edge

        quantization = qdrant_edge.QuantizationSearchParams(**options.quantization) if options.quantization else None
        self._params = qdrant_edge.SearchParams(hnsw_ef=options.hnsw_ef, exact=options.exact, quantization=quantization)
        self._shard = shard
        self.dimensions = dimensions

    def count(self) -> int:
        """See Collection."""
        import qdrant_edge

        return int(self._shard.count(qdrant_edge.CountRequest(exact=True)))

    def query(self, vectors: np.ndarray, limit: int) -> list[list[Point]]:
        """See Collection. One request per vector: a batch would be scored together."""
        import qdrant_edge

        requests = [
            qdrant_edge.QueryRequest(
                limit=limit, query=qdrant_edge.Query.Nearest(vector.tolist()), params=self._params, with_payload=True
            )
            for vector in vectors
        ]
        found = [self._shard.query(request) for request in requests]
        return [[Point(point.id, point.payload or {}, float(point.score)) for point in points] for points in found]

    def points(self, ids: Sequence[int], *, vectors: bool = False) -> list[Point]:
        """See Collection."""
        return [_point(point) for point in self._shard.retrieve(list(ids), True, vectors)]

    def sample(self, count: int) -> list[Point]:
        """See Collection."""
        import qdrant_edge

        found, _ = self._shard.scroll(qdrant_edge.ScrollRequest(limit=count, with_payload=True, with_vector=True))
        return [_point(point) for point in found]

    def existing(self, ids: Sequence[int]) -> set[int]:
        """See Collection."""
        return {point.id for point in self._shard.retrieve(list(ids), False, False)}

    def upsert(self, ids: Sequence[int], vectors: np.ndarray, payloads: Sequence[Mapping[str, Any]]) -> None:
        """See Collection. On disk when it returns."""
        import qdrant_edge

        rows = zip(ids, vectors.tolist(), payloads, strict=True)
        points = [qdrant_edge.Point(number, vector, dict(payload)) for number, vector, payload in rows]
        self._shard.update(qdrant_edge.UpdateOperation.upsert_points(points))
        self._shard.flush()

    def settle(self, report: StageProgress) -> None:
        """See Collection."""
        report("indexing", 0, 1)
        self._shard.optimize()
        self._shard.flush()

    def close(self) -> None:
        """Closes the folder."""
        self._shard.close()


def connect(
    url: str,
    name: str,
    *,
    api_key: str | None,
    grpc_port: int | None,
    timeout_s: float,
    tries: int,
    options: SearchOptions,
    create: int | None = None,
) -> ClientCollection:
    """A collection of a server. grpc_port: None for REST alone. create: dimensions of the collection to make where none of
    that name exists.

    Raises ConfigError: refused key, or a URL that is none; DataError: no such collection; RetrievalError: the server does not
    answer.
    """
    client_class = _client_class()
    try:
        client = client_class(
            url=url,
            api_key=api_key or os.environ.get("QDRANT_API_KEY"),
            prefer_grpc=grpc_port is not None,
            grpc_port=grpc_port or 6334,
            timeout=max(1, round(timeout_s)),
            check_compatibility=False,
        )
    except ValueError as problem:
        raise ConfigError(f"retriever qdrant.url: '{url}' ({problem}). Expected http(s)://host:port.") from None
    if create is not None:
        _create(client, name, create, lambda request: call(request, url, name, tries))
    return ClientCollection(client, name, url, options=options, tries=tries, lock=False)


def open_local(
    folder: Path | None, name: str, *, options: SearchOptions, create: int | None = None
) -> ClientCollection:
    """A collection of qdrant-client's local mode: exact, for up to about 20,000 points. folder: None for memory only."""
    client_class = _client_class()
    if folder is None:
        client = client_class(":memory:")
    else:
        try:
            client = client_class(path=str(folder), force_disable_check_same_thread=True)
        except (RuntimeError, ValueError, KeyError, TypeError, OSError, sqlite3.Error) as problem:
            reason = " ".join(str(problem).split())[:200]
            raise DataError(f"{folder}: cannot be opened ({reason}). Another process may hold it.") from None
    where = "memory" if folder is None else str(folder)
    if create is not None:
        _create(client, name, create, lambda request: call(request, where, name, 1))
    return ClientCollection(client, name, where, options=options, tries=1, lock=True)


def open_edge(folder: Path, dimensions: int, *, options: SearchOptions, create: bool = False) -> EdgeCollection:
    """The shard in a folder; with `create` an empty one is made where there is none. Raises DataError: damaged or in use."""
    with needing("retriever qdrant (engine: edge)", install_command("qdrant")):
        import qdrant_edge
    config = qdrant_edge.EdgeConfig(
        vectors=qdrant_edge.EdgeVectorParams(size=dimensions, distance=qdrant_edge.Distance.Cosine),
        hnsw_config=qdrant_edge.HnswIndexConfig(
            m=HNSW_M, ef_construct=HNSW_EF_CONSTRUCT, full_scan_threshold=_FULL_SCAN_KB
        ),
    )
    try:
        if create and not (folder / "segments").is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            shard = qdrant_edge.EdgeShard.create(str(folder), config)
        else:
            shard = qdrant_edge.EdgeShard.load(str(folder))
    except (OSError, ValueError, RuntimeError) as problem:
        raise DataError(
            f"{folder}: expected a shard of qdrant-edge ({problem}). Another process may hold it."
        ) from None
    return EdgeCollection(shard, dimensions, options=options)


def call(request: Callable[[], T], where: str, name: str, tries: int) -> T:
    """What a request returns; connection errors, timeouts, 429 and 5xx are tried again after a random pause.

    Raises ConfigError: the key is refused; DataError: no such collection; RetrievalError: no answer after all tries.
    """
    import grpc
    from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

    def attempt() -> T:
        try:
            return request()
        except UnexpectedResponse as error:
            _refused(error.status_code, where, name, error.reason_phrase)
            check_status("", error.status_code or 500, error.headers, error.reason_phrase)
            raise RetrievalError(f"{where}, collection '{name}': {error.status_code} {error.reason_phrase}.") from None
        except grpc.RpcError as error:
            _refused(_HTTP_OF_GRPC.get(error.code().name, 500), where, name, error.details())
            raise Retryable(str(error)) from None
        except ResponseHandlingException as error:
            raise Retryable(str(error)) from None
        except ValueError as error:  # local mode
            raise DataError(f"{where}, collection '{name}': {error}.") from None

    try:
        return RetryPolicy(tries, FIRST_PAUSE_S, LONGEST_PAUSE_S).call(attempt, random.Random())
    except GaveUp as end:
        reason = " ".join(str(end.last).split())[:200]
        raise RetrievalError(f"{where}, collection '{name}': no answer after {tries} tries ({reason}).") from None


_HTTP_OF_GRPC = {"UNAUTHENTICATED": 401, "PERMISSION_DENIED": 403, "NOT_FOUND": 404}


def _refused(status: int | None, where: str, name: str, reason: str | None) -> None:
    if status in (401, 403):
        raise ConfigError(f"{where}: the key is refused ({status} {reason}). Set retriever.api_key, or QDRANT_API_KEY.")
    if status == 404:
        raise DataError(f"{where}: no collection '{name}'. Build it with `rlflow search build --index qdrant`.")


def _create(client: Any, name: str, dimensions: int, run: Callable[[Callable[[], Any]], Any]) -> None:
    from qdrant_client import models

    if run(lambda: client.collection_exists(name)):
        return
    run(
        lambda: client.create_collection(
            name,
            vectors_config=models.VectorParams(size=dimensions, distance=models.Distance.COSINE),
            hnsw_config=models.HnswConfigDiff(m=HNSW_M, ef_construct=HNSW_EF_CONSTRUCT),
        )
    )


def _search_params(options: SearchOptions) -> Any:
    from qdrant_client import models

    quantization = None
    if options.quantization is not None:
        quantization = models.QuantizationSearchParams(**options.quantization)
    return models.SearchParams(hnsw_ef=options.hnsw_ef, exact=options.exact, quantization=quantization)


def check_quantization(quantization: Mapping[str, Any] | None) -> None:
    """Raises ConfigError for a parameter that Qdrant does not have."""

    def known(*, ignore: bool = False, rescore: bool = False, oversampling: float = 1.0) -> None: ...

    check_options(quantization or {}, known, where="retriever qdrant.quantization")


def _client_class() -> Any:
    with needing("retriever qdrant", install_command("qdrant")):
        from qdrant_client import QdrantClient
    return QdrantClient


def _point(point: Any) -> Point:
    vector = getattr(point, "vector", None)
    if isinstance(vector, Mapping):
        vector = vector.get("")
    return Point(point.id, point.payload or {}, vector=None if vector is None else np.asarray(vector, np.float32))
