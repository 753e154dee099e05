"""What the server does, counted: for Prometheus, and over the last minutes for the status page.

Several processes count as one where `PROMETHEUS_MULTIPROC_DIR` is set before this is imported
(prometheus_client then keeps every value in a file of that folder, which outlives the process that
counted) and their latest requests stand in one shared table."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

WINDOW_S = 60.0
KEPT = 20_000
SHARED = "PROMETHEUS_MULTIPROC_DIR"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Observation:
    """One answered `POST /retrieve`. Times in seconds; counts are of its queries."""

    at: float
    seconds: float
    waited: float
    searched: float
    queries: int
    cached: int
    shared: int
    empty: int


FIELDS = len(Observation.__dataclass_fields__)


class ServerStatistics:
    """Counters in a registry of their own, so that several servers may live in one process."""

    def __init__(self, recent: np.ndarray | None = None, place: int = 0) -> None:
        """recent: see `SharedState.recent`; place: the row of it that this process fills."""
        self.registry = CollectorRegistry()
        made = {"registry": self.registry, "namespace": "rlflow_search"}
        self.requests = Counter("requests", "answered requests", ["endpoint", "status"], **made)
        self.queries = Counter("queries", "answered queries", **made)
        self.empty = Counter("empty_results", "queries without a result", **made)
        self.cached = Counter("cache_hits", "queries answered from the cache", **made)
        self.shared = Counter(
            "shared_queries", "queries that joined an equal one under way", **made
        )
        self.seconds = Histogram(
            "request_seconds", "from the request to its answer", buckets=SECONDS, **made
        )
        self.waited = Histogram(
            "queue_seconds", "from the request to its first batch", buckets=SECONDS, **made
        )
        self.searched = Histogram("search_seconds", "of one batch", buckets=SECONDS, **made)
        self.batches = Histogram("batch_size", "queries searched together", buckets=SIZES, **made)
        least = {"multiprocess_mode": "livemin", **made}
        self.waiting = Gauge(
            "queue_length",
            "searches that wait for their batch",
            multiprocess_mode="livesum",
            **made,
        )
        self.ready = Gauge("ready", "1 when the server can answer", **least)
        self.loaded = Gauge("loading_progress", "share of the loading that is done", **least)
        self.reloads = Counter("reloads", "index reloads", ["outcome"], **made)
        self._recent = np.zeros((1, KEPT, FIELDS)) if recent is None else recent
        self._mine = self._recent[place]
        self._count = 0

    def batch(self, size: int, seconds: float) -> None:
        """Records one batch."""
        self.batches.observe(size)
        self.searched.observe(seconds)

    def answered(self, request: Observation) -> None:
        """Records one answered search request."""
        self.queries.inc(request.queries)
        self.seconds.observe(request.seconds)
        self.waited.observe(request.waited)
        if request.empty:
            self.empty.inc(request.empty)
        if request.cached:
            self.cached.inc(request.cached)
        if request.shared:
            self.shared.inc(request.shared)
        self._mine[self._count % KEPT] = tuple(vars(request).values())
        self._count += 1

    def exposition(self) -> bytes:
        """The metrics in Prometheus' text format."""
        registry = self.registry
        if SHARED in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)
        return generate_latest(registry)

    def last_minute(self) -> dict[str, float]:
        """Rates and latencies of the requests of the last minute, in queries/s, seconds and shares
        of the queries."""
        now = time.monotonic()
        recent = self._recent[
            (self._recent[:, :, 0] > 0) & (now - self._recent[:, :, 0] <= WINDOW_S)
        ]
        at, seconds, waited, searched, queries, cached, shared, empty = recent.T
        asked = max(1.0, queries.sum())
        found = {
            "queries_per_s": queries.sum() / max(1.0, now - at.min(initial=now)),
            "p50_s": quantile(seconds, 0.5),
            "p99_s": quantile(seconds, 0.99),
            "queue_p99_s": quantile(waited, 0.99),
            "search_p50_s": quantile(searched, 0.5),
            "hit_rate": (cached + shared).sum() / asked,
            "empty_rate": empty.sum() / asked,
        }
        return {"requests": len(recent), **{name: float(value) for name, value in found.items()}}


def quantile(values: np.ndarray, share: float) -> float:
    """The value below which `share` of the values lie (nearest rank); 0 without values."""
    return (
        float(np.sort(values)[min(len(values) - 1, int(share * len(values)))])
        if len(values)
        else 0.0
    )
