"""What the server knows and does, apart from HTTP: it loads an index, answers with it, and exchanges it for another."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlflow.errors import RLFlowError
from rlflow_environments.retrieval.errors import QueueFullError
from rlflow_environments.retrieval.server.index import Answer
from rlflow_environments.retrieval.server.query_log import QueryLog
from rlflow_environments.retrieval.server.statistics import Observation, ServerStatistics
from rlflow_environments.retrieval.server.wire import BadRequest, RetrieveRequest

logger = logging.getLogger(__name__)

LoadProgress = Callable[[str, float], None]
"""Called with what is being loaded and the share of it that is done, from 0 to 1."""


class Served(Protocol):
    """What answers: an index in this process (`ServedIndex`), or the processes that have it (`Generation`)."""

    info: dict[str, Any]
    size: int | None
    has_pages: bool

    @property
    def waiting(self) -> int:
        """How many searches wait for their batch."""

    async def answer(self, queries: Sequence[str], top_k: int, wait_s: float) -> Answer:
        """The hits of every query. Raises QueueFullError, Unavailable, TimeoutError, what the retriever raises."""

    def page(self, url: str) -> bytes | None:
        """The page of a URL, None for an unknown one."""

    def report(self) -> dict[str, Any]:
        """What `/health` says of it."""

    def begin(self) -> None:
        """From now on this one is asked."""

    async def retire(self) -> None:
        """Another one is asked from now on: returns when this one takes no request any more; those under way are answered."""

    async def close(self) -> None:
        """Ends it; returns when nothing is left."""


RECENT, RECENT_CHARACTERS = 20, 300
"""Searches that the status page shows, and how much of each query is kept."""
Load = Callable[[Mapping[str, Any], LoadProgress, Callable[[int, float], None]], Served]
"""(changes to what is served, report, on_batch) -> the index. Runs in a thread; raises RLFlowError."""


class Unavailable(Exception):
    """Nothing can be answered now; after `retry_after_s` perhaps. status: 503, or 429 where the queue is full."""

    def __init__(self, text: str, status: int, retry_after_s: int = 1) -> None:
        super().__init__(text)
        self.status = status
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class ServiceLimits:
    """top_k: where a request has none. max_top_k: the largest that is taken. max_wait_s: for an answer."""

    top_k: int = 3
    max_top_k: int = 10_000
    max_wait_s: float = 60.0


class SearchService:
    """The state of one server: loading, ready, failed or stopping. All methods but `load` belong to the event loop."""

    def __init__(
        self,
        load: Load,
        limits: ServiceLimits | None = None,
        query_log: QueryLog | None = None,
        statistics: ServerStatistics | None = None,
        admin_token: str | None = None,
    ) -> None:
        """admin_token: of requests that change the server or tell what others asked; None: a new one."""
        self.limits = limits or ServiceLimits()
        self.statistics = statistics or ServerStatistics()
        self.query_log = query_log
        self.admin_token = admin_token or secrets.token_urlsafe()
        self.state = "loading"
        self.problem: Exception | None = None
        self.index: Served | None = None
        self.stage, self.share = "starting", 0.0
        self.started = time.monotonic()
        self._load = load
        self._reloading = False
        self._recent: deque[tuple[str, int, float]] = deque(maxlen=RECENT)

    # ------------------------------------------------------------ loading

    async def load(self, changes: Mapping[str, Any] | None = None) -> Served:
        """Loads in a thread and then, in one step, answers with what was loaded. Raises RLFlowError: nothing changes then."""
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[Served] = loop.create_future()

        def work() -> None:
            index, problem = None, None
            try:
                index = self._load(changes or {}, self._report, self.statistics.batch)
            except Exception as failure:  # noqa: BLE001 -- it is raised in the caller
                problem = failure
            with contextlib.suppress(RuntimeError):  # the server was stopped: its loop is closed
                loop.call_soon_threadsafe(_settle, loaded, index, problem)

        # A daemon thread: loading may take long and must not keep a server alive that is asked to stop.
        threading.Thread(target=work, name="search-load", daemon=True).start()
        index, former = await loaded, self.index
        if self.state == "stopping":
            await index.close()
            return index
        self.serve(index)
        if former is not None:
            await former.retire()
        return index

    def serve(self, index: Served) -> None:
        """From now on this one answers."""
        self.index = index
        index.begin()
        self.state = "ready"
        self._report("ready", 1.0)
        self.statistics.ready.set(1)

    async def reload(self, changes: Mapping[str, Any]) -> Served:
        """As `load`, while the present index goes on answering. Raises Unavailable while another reload is under way."""
        if self._reloading or self.state == "loading":
            raise Unavailable("an index is being loaded already.", status=409)
        self._reloading = True
        try:
            index = await self.load(changes)
        except (RLFlowError, OSError) as problem:
            self.statistics.reloads.labels("failed").inc()
            logger.error("reload failed, the index stays as it is: %s", problem)
            raise
        finally:
            self._reloading = False
            self.stage, self.share = "ready", 1.0
        self.statistics.reloads.labels("done").inc()
        logger.info("reload done: %s", index.info.get("identity", ""))
        return index

    def fail(self, problem: Exception) -> None:
        """Records that the first index could not be loaded."""
        self.state, self.problem = "failed", problem

    def stop(self) -> None:
        """From now on the server says that it is not ready."""
        self.state = "stopping"
        self.statistics.ready.set(0)

    async def close(self) -> None:
        """Ends what answers."""
        if self.index is not None:
            await self.index.close()

    def _report(self, stage: str, share: float) -> None:
        if stage != self.stage:
            logger.info("%s ...", stage)
        self.stage, self.share = stage, share
        self.statistics.loaded.set(share)

    # ------------------------------------------------------------ answering

    async def retrieve(self, request: RetrieveRequest, *, trace: str = "", wait_s: float | None = None) -> Answer:
        """The answer to a search request. wait_s: how long its client waits.

        Raises BadRequest, Unavailable, TimeoutError, and what the retriever raises.
        """
        index = self._ready()
        top_k = self._top_k(request.top_k, index)
        start = time.perf_counter()
        try:
            wait_s = min(wait_s or self.limits.max_wait_s, self.limits.max_wait_s)
            answer = await index.answer(request.queries, top_k, wait_s)
        except QueueFullError as problem:
            raise Unavailable(str(problem), status=429, retry_after_s=self._drain_s(index)) from None
        observed = Observation(
            at=time.monotonic(),
            seconds=time.perf_counter() - start,
            waited=answer.waited_s,
            searched=answer.searched_s,
            queries=len(request.queries),
            cached=answer.cached,
            shared=answer.shared,
            empty=sum(not hits for hits in answer.results),
        )
        self.statistics.answered(observed)
        found = zip(request.queries[-RECENT:], answer.results[-RECENT:])
        self._recent.extend((query[:RECENT_CHARACTERS], len(hits), observed.seconds) for query, hits in found)
        if self.query_log is not None:
            self.query_log.write(trace, request.queries, top_k, answer, observed.seconds)
        return answer

    def access(self, urls: list[str]) -> list[bytes | None]:
        """The page of each URL, None for an unknown one; all None where no pages are loaded. Raises Unavailable."""
        index = self._ready()
        return [index.page(url) for url in urls]

    def _ready(self) -> Served:
        if self.index is None:
            raise Unavailable(f"not ready: {self.stage}, {self.share:.0%} done.", status=503)
        return self.index

    def _top_k(self, asked: int | None, index: Served) -> int:
        top_k = asked or self.limits.top_k
        if index.size is not None:
            top_k = min(top_k, index.size)
        if top_k > self.limits.max_top_k:
            raise BadRequest(f"topk: at most {self.limits.max_top_k}, found {top_k}.")
        return top_k

    def _drain_s(self, index: Served) -> int:
        """Whole seconds after which the present queue should be answered, at the rate of the last minute."""
        rate = self.statistics.last_minute()["queries_per_s"]
        return max(1, min(30, round(index.waiting / rate))) if rate else 1

    # ------------------------------------------------------------ reports

    def health(self) -> dict[str, Any]:
        """What `GET /health` answers: always, at once."""
        report: dict[str, Any] = {"status": self.state, "stage": self.stage, "progress": round(self.share, 3)}
        report["pages"] = bool(self.index and self.index.has_pages)
        report["uptime_s"] = round(time.monotonic() - self.started, 1)
        if self.problem is not None:
            report["problem"] = str(self.problem)
        return {**report, **(self.index.report() if self.index else {})}

    def info(self) -> dict[str, Any]:
        """What `GET /info` answers: what is served, by hash."""
        served = self.index.info if self.index else {}
        return {"status": self.state, "topk": self.limits.top_k, **served}

    def metrics(self) -> bytes:
        """What `GET /metrics` answers."""
        self.statistics.waiting.set(self._waiting())
        return self.statistics.exposition()

    def status(self) -> dict[str, Any]:
        """What the status page shows."""
        return {**self.health(), "queue": self._waiting(), **self.statistics.last_minute(), "info": self.info()}

    def recent(self) -> list[dict[str, Any]]:
        """The latest queries of this process, newest first: what they found, and the seconds of their request."""
        return [{"query": query, "found": found, "seconds": seconds} for query, found, seconds in reversed(self._recent)]

    def _waiting(self) -> int:
        return self.index.waiting if self.index else 0


def _settle(future: asyncio.Future[Served], index: Served | None, problem: Exception | None) -> None:
    if future.done():
        return
    if problem is None:
        future.set_result(index)  # type: ignore[arg-type]
    else:
        future.set_exception(problem)
