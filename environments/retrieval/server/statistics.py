"""Counters of the server for Prometheus, from which the status page computes its figures, and its
log of queries.

Several processes count as one where `PROMETHEUS_MULTIPROC_DIR` is set before this is imported:
prometheus_client then keeps every value in a file of that folder, which outlives the process that
counted."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from rlflow.errors import ConfigError
from rlflow_environments.retrieval.records import dump_json, load_record
from rlflow_environments.retrieval.server.index import Answer

logger = logging.getLogger(__name__)

SHARED = "PROMETHEUS_MULTIPROC_DIR"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
KEPT_BYTES = 16 << 20  # of lines of the query log that wait to be written


class ServerStatistics:
    """Counters in a registry of their own, so that several servers may live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        made = {"registry": self.registry, "namespace": "rlflow_search"}
        timed = {"buckets": SECONDS, **made}
        self.requests = Counter("requests", "answered requests", ["endpoint", "status"], **made)
        self.queries = Counter("queries", "answered queries", **made)
        self.empty = Counter("empty_results", "queries without a result", **made)
        self.cached = Counter("cache_hits", "queries answered from the cache", **made)
        joined = "queries that joined an equal one under way"
        self.shared = Counter("shared_queries", joined, **made)
        self.seconds = Histogram("request_seconds", "from the request to its answer", **timed)
        self.waited = Histogram("queue_seconds", "from the request to its first batch", **timed)
        self.searched = Histogram("search_seconds", "of one batch", **timed)
        self.batches = Histogram("batch_size", "queries searched together", buckets=SIZES, **made)
        least, most = ({"multiprocess_mode": mode, **made} for mode in ("livemin", "livesum"))
        self.waiting = Gauge("queue_length", "searches that wait for their batch", **most)
        self.ready = Gauge("ready", "1 when the server can answer", **least)
        self.loaded = Gauge("loading_progress", "share of the loading that is done", **least)
        self.reloads = Counter("reloads", "index reloads", ["outcome"], **made)

    def batch(self, size: int, seconds: float) -> None:
        """Records one batch."""
        self.batches.observe(size)
        self.searched.observe(seconds)

    def answered(self, answer: Answer, seconds: float) -> None:
        """Records one answered search request."""
        self.queries.inc(len(answer.results))
        self.seconds.observe(seconds)
        self.waited.observe(answer.waited_s)
        self.empty.inc(sum(not hits for hits in answer.results))
        self.cached.inc(answer.cached)
        self.shared.inc(answer.shared)

    def exposition(self) -> bytes:
        """The metrics in Prometheus' text format."""
        registry = self.registry
        if SHARED in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)
        return generate_latest(registry)


class QueryLog:
    """One line of JSON per search request, so that a query of a trajectory can be found again in
    the server.

    Lines are gathered in memory; `flush`, called now and then, writes them. A busy terminal or
    disk then slows no answer, and a full one ends nothing: lines that it does not take are dropped,
    which is said once."""

    def __init__(self, path: str | Path) -> None:
        """Opens the file for appending. Raises ConfigError where that is not possible."""
        try:
            self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115
        except OSError as problem:
            raise ConfigError(f"--query-log {path}: cannot be written ({problem}).") from None
        self._path = path
        self._lines: list[bytes] = []
        self._bytes = 0
        self._cut = False  # whether the file ends within a line
        self._failing = False

    def write(
        self, trace: str, queries: Sequence[str], top_k: int, answer: Answer, seconds: float
    ) -> None:
        """One line: the trace of the request, its queries, times in ms, and the ids that each query
        found."""
        times = {"total": seconds, "queued": answer.waited_s, "searched": answer.searched_s}
        found = [[load_record(hit)["id"] for hit, _ in hits] for hits in answer.results]
        line = {
            "trace": trace,
            "queries": [query.encode("utf-8", "replace").decode() for query in queries],
            "topk": top_k,
            **{f"{name}_ms": round(spent * 1000, 2) for name, spent in times.items()},
            "cached": answer.cached,
            "shared": answer.shared,
            "ids": found,
        }
        self._lines.append(dump_json(line) + b"\n")
        self._bytes += len(self._lines[-1])
        if self._bytes > KEPT_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes what has gathered. What the disk does not take is dropped."""
        data = (b"\n" if self._cut and self._lines else b"") + b"".join(self._lines)
        self._lines.clear()
        self._bytes = 0
        try:
            while data:
                data = data[self._file.write(data) :]
                self._cut, self._failing = bool(data), False
        except OSError as problem:
            if not self._failing:
                told = "--query-log %s: cannot be written (%s); lines are left out"
                logger.warning(told, self._path, problem.strerror)
            self._failing = True

    def close(self) -> None:
        """Writes what has gathered and closes the file."""
        self.flush()
        self._file.close()
