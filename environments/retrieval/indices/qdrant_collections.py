"""Qdrant collections: of a server, of qdrant-client's local mode, and of the engine embedded in
this process (qdrant-edge).

The layout is the one that RLinf's builder makes: one unnamed vector, cosine, point id = row of the
corpus, payload = the record. `params` are those of every query: hnsw_ef (candidates of the graph
search), exact (scan instead), quantization (ignore, rescore, oversampling).
"""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from rlflow.errors import ConfigError, DataError, install_command, needing
from rlflow.http import GaveUp, Retryable, RetryPolicy, check_status
from rlflow_environments.common.progress import StageProgress
from rlflow_environments.retrieval.errors import RetrievalError

SHARD, STORAGE, LOCAL_COLLECTION = "shard", "storage", "corpus"
"""Where an embedded collection lies in an index folder (edge, local), and the name of a local
one."""
HNSW_M, HNSW_EF_CONSTRUCT = 32, 512
_FULL_SCAN_KB = 10_000  # Qdrant's default: smaller segments are scanned
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 8.0
_HTTP_OF_GRPC = {"UNAUTHENTICATED": 401, "PERMISSION_DENIED": 403, "NOT_FOUND": 404}

T = TypeVar("T")


@dataclass(frozen=True)
class Point:
    """A stored point. score: of a search, 0 otherwise. vector: where it was asked for."""

    id: int
    payload: Mapping[str, Any]
    score: float = 0.0
    vector: np.ndarray | None = None


class Collection(Protocol):
    """Points with one vector each. Thread-safe."""

    dimensions: int

    def count(self) -> int: ...

    def query(self, vectors: np.ndarray, limit: int) -> list[list[Point]]:
        """The nearest points of each of (B, D) vectors, with payloads, best first."""

    def points(
        self, ids: Sequence[int], *, payloads: bool = True, vectors: bool = False
    ) -> list[Point]:
        """Those of the points that exist."""

    def sample(self, count: int) -> list[Point]:
        """Some points, with vectors."""

    def upsert(
        self, ids: Sequence[int], vectors: np.ndarray, payloads: Sequence[Mapping[str, Any]]
    ) -> None:
        """Stores points; they are on disk when it returns."""

    def settle(self, report: StageProgress) -> None:
        """Builds what speeds up searches, and waits for it."""

    def close(self) -> None:
        """Closes the connection or the folder."""


class ClientCollection:
    """A collection behind qdrant-client: of a server (REST or gRPC), or of its local mode."""

    def __init__(
        self,
        client: Any,
        name: str,
        where: str,
        params: Mapping[str, Any],
        *,
        create: int | None,
        tries: int = 1,
        local: bool = False,
    ) -> None:
        """create: dimensions of the collection to make where none of that name exists. local: local
        mode, which is not thread-safe.

        Raises DataError: no such collection, or one of another layout."""
        from qdrant_client import models

        self._client, self._name, self._where, self._tries = client, name, where, tries
        self._lock = threading.Lock() if local else contextlib.nullcontext()
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
                f"{where}, collection '{name}': expected one unnamed vector with cosine distance, "
                f"found {vectors}."
            )
        self.dimensions = int(vectors.size)

    def count(self) -> int:
        return int(self._call(self._client.count, exact=True).count)

    def query(self, vectors: np.ndarray, limit: int) -> list[list[Point]]:
        from qdrant_client import models

        requests = [
            models.QueryRequest(
                query=vector.tolist(), limit=limit, params=self._params, with_payload=True
            )
            for vector in vectors
        ]
        answers = self._call(self._client.query_batch_points, requests=requests)
        return [[_point(point) for point in answer.points] for answer in answers]

    def points(
        self, ids: Sequence[int], *, payloads: bool = True, vectors: bool = False
    ) -> list[Point]:
        found = self._call(
            self._client.retrieve, ids=list(ids), with_payload=payloads, with_vectors=vectors
        )
        return [_point(point) for point in found]

    def sample(self, count: int) -> list[Point]:
        found, _ = self._call(
            self._client.scroll, limit=count, with_payload=True, with_vectors=True
        )
        return [_point(point) for point in found]

    def upsert(
        self, ids: Sequence[int], vectors: np.ndarray, payloads: Sequence[Mapping[str, Any]]
    ) -> None:
        from qdrant_client import models

        batch = models.Batch(
            ids=list(ids),
            vectors=vectors.tolist(),
            payloads=[dict(payload) for payload in payloads],
        )
        self._call(self._client.upsert, points=batch, wait=True)

    def settle(self, report: StageProgress) -> None:
        """A server optimizes by itself."""
        while self._call(self._client.get_collection).status != "green":
            report("indexing on the server", 0, 1)
            time.sleep(1.0)

    def close(self) -> None:
        self._client.close()

    def _call(self, request: Callable[..., T], **arguments: Any) -> T:
        """What a request returns. Connection errors, timeouts, 429 and 5xx are tried again.

        Raises ConfigError: the key is refused; DataError: no such collection; RetrievalError: no
        answer after all tries."""
        import grpc
        from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

        where = f"{self._where}, collection '{self._name}'"

        def attempt() -> T:
            try:
                with self._lock:
                    return request(collection_name=self._name, **arguments)
            except UnexpectedResponse as error:
                status, reason = error.status_code or 500, error.reason_phrase
                self._check_refused(status, reason)
                check_status("", status, error.headers, reason)
                raise RetrievalError(f"{where}: {status} {reason}.") from None
            except grpc.RpcError as error:
                self._check_refused(_HTTP_OF_GRPC.get(error.code().name, 500), error.details())
                raise Retryable(str(error)) from None
            except ResponseHandlingException as error:
                raise Retryable(str(error)) from None
            except ValueError as error:  # local mode
                raise DataError(f"{where}: {error}.") from None

        try:
            policy = RetryPolicy(self._tries, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            return policy.call(attempt, random.Random())
        except GaveUp as end:
            reason = " ".join(str(end.last).split())[:200]
            raise RetrievalError(
                f"{where}: no answer after {self._tries} tries ({reason})."
            ) from None

    def _check_refused(self, status: int, reason: str | None) -> None:
        if status in (401, 403):
            raise ConfigError(
                f"{self._where}: the key is refused ({status} {reason}). Set retriever.api_key, or "
                "QDRANT_API_KEY."
            )
        if status == 404:
            raise DataError(
                f"{self._where}: no collection '{self._name}'. Build it with `rlflow search build "
                "--index qdrant`."
            )


class EdgeCollection:
    """A shard of the embedded engine. Its folder belongs to one process."""

    def __init__(
        self, folder: Path | None, dimensions: int, params: Mapping[str, Any], create: bool
    ) -> None:
        """folder: None for one that lives as long as this object. create: an empty shard where
        there is none. Raises DataError: damaged or in use."""
        with needing("retriever qdrant (engine: edge)", install_command("qdrant")):
            import qdrant_edge
        self._edge = qdrant_edge
        self.dimensions = dimensions
        quantization = params.get("quantization")
        if quantization:
            quantization = qdrant_edge.QuantizationSearchParams(**quantization)
        self._params = qdrant_edge.SearchParams(**{**params, "quantization": quantization or None})
        if folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="rlflow-qdrant-")
            folder = Path(self._temporary.name)
        config = qdrant_edge.EdgeConfig(
            vectors=qdrant_edge.EdgeVectorParams(
                size=dimensions, distance=qdrant_edge.Distance.Cosine
            ),
            hnsw_config=qdrant_edge.HnswIndexConfig(
                m=HNSW_M, ef_construct=HNSW_EF_CONSTRUCT, full_scan_threshold=_FULL_SCAN_KB
            ),
        )
        try:
            if create and not (folder / "segments").is_dir():
                folder.mkdir(parents=True, exist_ok=True)
                self._shard = qdrant_edge.EdgeShard.create(str(folder), config)
            else:
                self._shard = qdrant_edge.EdgeShard.load(str(folder))
        except (OSError, ValueError, RuntimeError) as problem:
            raise DataError(
                f"{folder}: expected a shard of qdrant-edge ({problem}). Another process may hold "
                "it."
            ) from None

    def count(self) -> int:
        return int(self._shard.count(self._edge.CountRequest(exact=True)))

    def query(self, vectors: np.ndarray, limit: int) -> list[list[Point]]:
        """One request per vector: a batch would be scored together."""
        requests = (
            self._edge.QueryRequest(
                limit=limit,
                query=self._edge.Query.Nearest(vector.tolist()),
                params=self._params,
                with_payload=True,
            )
            for vector in vectors
        )
        return [[_point(point) for point in self._shard.query(request)] for request in requests]

    def points(
        self, ids: Sequence[int], *, payloads: bool = True, vectors: bool = False
    ) -> list[Point]:
        return [_point(point) for point in self._shard.retrieve(list(ids), payloads, vectors)]

    def sample(self, count: int) -> list[Point]:
        request = self._edge.ScrollRequest(limit=count, with_payload=True, with_vector=True)
        return [_point(point) for point in self._shard.scroll(request)[0]]

    def upsert(
        self, ids: Sequence[int], vectors: np.ndarray, payloads: Sequence[Mapping[str, Any]]
    ) -> None:
        rows = zip(ids, vectors.tolist(), payloads, strict=True)
        points = [self._edge.Point(number, vector, dict(kept)) for number, vector, kept in rows]
        self._shard.update(self._edge.UpdateOperation.upsert_points(points))
        self._shard.flush()

    def settle(self, report: StageProgress) -> None:
        report("indexing", 0, 1)
        self._shard.optimize()
        self._shard.flush()

    def close(self) -> None:
        self._shard.close()


def connect(
    url: str,
    name: str,
    *,
    api_key: str | None,
    grpc_port: int | None,
    timeout_s: float,
    tries: int,
    params: Mapping[str, Any] = {},
    create: int | None = None,
) -> ClientCollection:
    """A collection of a server. grpc_port: None for REST alone. create: see ClientCollection.

    Raises ConfigError: refused key, or a URL that is none; DataError: no such collection;
    RetrievalError: the server does not answer.
    """
    try:
        client = _client(
            url=url,
            api_key=api_key or os.environ.get("QDRANT_API_KEY"),
            prefer_grpc=grpc_port is not None,
            grpc_port=grpc_port or 6334,
            timeout=max(1, round(timeout_s)),
            check_compatibility=False,
        )
    except ValueError as problem:
        raise ConfigError(
            f"retriever qdrant.url: '{url}' ({problem}). Expected http(s)://host:port."
        ) from None
    return ClientCollection(client, name, url, params, create=create, tries=tries)


def open_embedded(
    engine: str,
    folder: Path | None,
    dimensions: int,
    params: Mapping[str, Any] = {},
    *,
    create: bool = False,
) -> Collection:
    """The collection of an index folder, by the engine edge or local (exact, for up to about 20,000
    points); a new one for this process without a folder. Raises DataError: damaged or in use."""
    if engine == "edge":
        return EdgeCollection(folder and folder / SHARD, dimensions, params, create)
    made = dimensions if create else None
    if folder is None:
        client = _client(":memory:")
        return ClientCollection(client, LOCAL_COLLECTION, "memory", params, create=made, local=True)
    where = str(folder / STORAGE)
    try:
        client = _client(path=where, force_disable_check_same_thread=True)
    except (RuntimeError, ValueError, KeyError, TypeError, OSError, sqlite3.Error) as problem:
        reason = " ".join(str(problem).split())[:200]
        raise DataError(
            f"{where}: cannot be opened ({reason}). Another process may hold it."
        ) from None
    return ClientCollection(client, LOCAL_COLLECTION, where, params, create=made, local=True)


def _client(*arguments: Any, **keywords: Any) -> Any:
    with needing("retriever qdrant", install_command("qdrant")):
        from qdrant_client import QdrantClient
    return QdrantClient(*arguments, **keywords)


def _point(point: Any) -> Point:
    vector = getattr(point, "vector", None)
    if isinstance(vector, Mapping):
        vector = vector.get("")
    kept = None if vector is None else np.asarray(vector, np.float32)
    return Point(point.id, point.payload or {}, float(getattr(point, "score", 0.0)), kept)
