"""What the server does, counted: for Prometheus, and over the last minutes for the status page."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

WINDOW_S = 60.0
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


class ServerStatistics:
    """Counters in a registry of their own, so that several servers may live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        made = {"registry": self.registry, "namespace": "rlflow_search"}
        self.requests = Counter("requests", "answered requests", ["endpoint", "status"], **made)
        self.queries = Counter("queries", "answered queries", **made)
        self.empty = Counter("empty_results", "queries without a result", **made)
        self.cached = Counter("cache_hits", "queries answered from the cache", **made)
        self.shared = Counter("shared_queries", "queries that joined an equal one under way", **made)
        self.seconds = Histogram("request_seconds", "from the request to its answer", buckets=SECONDS, **made)
        self.waited = Histogram("queue_seconds", "from the request to its first batch", buckets=SECONDS, **made)
        self.searched = Histogram("search_seconds", "of one batch", buckets=SECONDS, **made)
        self.batches = Histogram("batch_size", "queries searched together", buckets=SIZES, **made)
        self.waiting = Gauge("queue_length", "searches that wait for their batch", **made)
        self.ready = Gauge("ready", "1 when the server can answer", **made)
        self.loaded = Gauge("loading_progress", "share of the loading that is done", **made)
        self.reloads = Counter("reloads", "index reloads", ["outcome"], **made)
        self._recent: deque[Observation] = deque(maxlen=20_000)

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
        self._recent.append(request)

    def exposition(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def last_minute(self) -> dict[str, float]:
        """Rates and latencies of the requests of the last minute, in queries/s, seconds and shares of the queries."""
        now = time.monotonic()
        recent = [request for request in self._recent if now - request.at <= WINDOW_S]
        queries = sum(request.queries for request in recent)
        span = max(1.0, now - recent[0].at) if recent else 1.0
        seconds = sorted(request.seconds for request in recent)
        return {
            "requests": len(recent),
            "queries_per_s": queries / span,
            "p50_s": quantile(seconds, 0.5),
            "p99_s": quantile(seconds, 0.99),
            "queue_p99_s": quantile(sorted(request.waited for request in recent), 0.99),
            "search_p50_s": quantile(sorted(request.searched for request in recent), 0.5),
            "hit_rate": sum(request.cached + request.shared for request in recent) / max(1, queries),
            "empty_rate": sum(request.empty for request in recent) / max(1, queries),
        }


def quantile(ordered: list[float], share: float) -> float:
    """The value below which `share` of the ordered values lie (nearest rank); 0 without values."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
