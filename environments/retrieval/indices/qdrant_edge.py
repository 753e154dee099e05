"""Qdrant's own engine on a directory of this machine, without a server (the package
qdrant-edge-py)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from rlflow.errors import DataError, install_command, needing
from rlflow_environments.common.progress import StageProgress

if TYPE_CHECKING:
    from qdrant_edge import EdgeShard, Record, ScoredPoint

_HELD = "WouldBlock"
"""Of the engine's error for a directory that another process has open."""


@dataclass(frozen=True)
class Graph:
    """The graph (HNSW) of a collection: links of a node, candidates while it is built, and the
    kilobytes of vectors from which there is one; smaller collections are scanned."""

    links: int
    candidates: int
    from_kb: int = 10_000


class _OpenShard:
    """A shard that this process has open: the engine opens a directory once. Closed when nothing
    refers to it any longer."""

    def __init__(self, shard: EdgeShard) -> None:
        self.shard = shard


_open: WeakValueDictionary[Path, _OpenShard] = WeakValueDictionary()
_opening = threading.Lock()


class EdgeCollection:
    """Points with one vector each in a directory; what `Collection` is on a server. Thread-safe.

    The engine holds Python's lock while it searches: queries go to it one by one, so that other
    threads run between them."""

    def __init__(
        self,
        path: Path,
        dimensions: int,
        params: Mapping[str, Any] = MappingProxyType({}),
        *,
        create: Graph | None = None,
    ) -> None:
        """params: of every query, as those of `Collection`. create: of the collection to make where
        there is none.

        Raises MissingPackageError, and DataError: no such collection, one of other dimensions, a
        damaged one, or one that another process has open."""
        with needing("retriever qdrant with a path", install_command("qdrant")):
            import qdrant_edge as edge
        self.dimensions = dimensions
        self._where = path
        given = {**params}
        if quantization := given.pop("quantization", None):
            given["quantization"] = edge.QuantizationSearchParams(**quantization)
        self._params = edge.SearchParams(**given)
        vectors = edge.EdgeVectorParams(size=dimensions, distance=edge.Distance.Cosine)
        config: dict[str, Any] = {"vectors": vectors}
        if create is not None:
            sizes = (create.links, create.candidates, create.from_kb)
            config["hnsw_config"] = edge.HnswIndexConfig(*sizes)
            config["optimizers"] = edge.EdgeOptimizersConfig(indexing_threshold=create.from_kb)
        place = path.resolve()
        with _opening:
            opened = _open.get(place)
            if opened is None:
                new = create is not None and not (place / "segments").is_dir()
                start = edge.EdgeShard.create if new else edge.EdgeShard.load
                with self._told():
                    opened = _OpenShard(start(str(place), edge.EdgeConfig(**config)))
                _open[place] = opened
        self._opened = opened

    def indexed(self) -> int:
        """Points that the graph holds; the others are scanned."""
        with self._told():
            return self._opened.shard.info().indexed_vectors_count

    def count(self) -> int:
        from qdrant_edge import CountRequest

        with self._told():
            return self._opened.shard.count(CountRequest(exact=True))

    def query(self, vectors: np.ndarray, limit: int) -> list[list[ScoredPoint]]:
        """The nearest points of each of (B, D) vectors, with payloads, best first."""
        import qdrant_edge as edge

        asked = {"limit": limit, "params": self._params, "with_payload": True}
        with self._told():
            return [
                self._opened.shard.query(
                    edge.QueryRequest(query=edge.Query.Nearest(vector.tolist()), **asked)
                )
                for vector in vectors
            ]

    def points(
        self, ids: Sequence[int], *, payloads: bool = True, vectors: bool = False
    ) -> list[Record]:
        """Those of the points that exist."""
        with self._told():
            return self._opened.shard.retrieve(list(ids), payloads, vectors)

    def sample(self, count: int) -> list[Record]:
        """Some points, with vectors."""
        from qdrant_edge import ScrollRequest

        request = ScrollRequest(limit=count, with_payload=True, with_vector=True)
        with self._told():
            return self._opened.shard.scroll(request)[0]

    def upsert(
        self, ids: Sequence[int], vectors: np.ndarray, payloads: Sequence[Mapping[str, Any]]
    ) -> None:
        """Stores points; they outlive this process when it returns."""
        import qdrant_edge as edge

        points = [
            edge.Point(row, vector, dict(payload))
            for row, vector, payload in zip(ids, vectors.tolist(), payloads, strict=True)
        ]
        with self._told():
            self._opened.shard.update(edge.UpdateOperation.upsert_points(points))

    def settle(self, report: StageProgress) -> None:
        """Builds the graph where the collection is large enough for one, and writes all to disk."""
        report("building the graph", 0, 1)
        with self._told():
            self._opened.shard.optimize()
            self._opened.shard.flush()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Raises DataError for errors of the engine, which have no class of their own."""
        try:
            yield
        except Exception as problem:
            if type(problem) is not Exception:
                raise
            reason = " ".join(str(problem).split())[:300]
            if _HELD in reason:
                raise DataError(
                    f"{self._where}: another process has this collection open, and one at a time "
                    "may. Serve it to all (rlflow search serve --index, retriever http), or end "
                    "the other."
                ) from None
            raise DataError(
                f"{self._where}: Qdrant's engine: {reason}. Build the index again, or copy it "
                "again."
            ) from None
