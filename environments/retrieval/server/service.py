"""The server apart from HTTP: it loads an index, answers with it, and exchanges it for another."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlflow.errors import RLFlowError
from rlflow.storage.daemon import start_daemon
from rlflow_environments.retrieval.errors import QueueFullError
from rlflow_environments.retrieval.server.index import Answer, ServedIndex
from rlflow_environments.retrieval.server.shared import SharedState
from rlflow_environments.retrieval.server.statistics import QueryLog, ServerStatistics
from rlflow_environments.retrieval.server.wire import NotServed, RetrieveRequest

logger = logging.getLogger(__name__)

LoadProgress = Callable[[str, float], None]
"""Called with what is being loaded and the share of it that is done, from 0 to 1."""
Load = Callable[[Mapping[str, Any], LoadProgress, Callable[[int, float], None]], ServedIndex]
"""(changes to what is served, report, on_batch) -> the index. Runs in a thread; raises
RLFlowError."""


@dataclass(frozen=True)
class ServiceLimits:
    """top_k: where a request has none. max_top_k: the largest that is taken. max_wait_s: for an
    answer."""

    top_k: int = 3
    max_top_k: int = 10_000
    max_wait_s: float = 60.0


class SearchService:
    """The state of one server process: loading, ready, failed or stopping. All methods belong to
    the event loop."""

    def __init__(
        self,
        load: Load,
        limits: ServiceLimits | None = None,
        query_log: QueryLog | None = None,
        admin_token: str | None = None,
        shared: SharedState | None = None,
        replace_all: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        """admin_token: of requests that change the server; None: a new one. shared: with the other
        processes of this server; replace_all: has new processes with these changes take their
        places."""
        self.limits = limits or ServiceLimits()
        self.statistics = ServerStatistics()
        self.query_log = query_log
        self.admin_token = admin_token or secrets.token_urlsafe()
        self.shared = shared
        self.state = "loading"
        self.problem: Exception | None = None
        self.index: ServedIndex | None = None
        self.stage, self.share = "starting", 0.0
        self.started = time.monotonic()
        self._load, self._replace_all = load, replace_all
        self._reloading = False

    # ------------------------------------------------------------ loading

    async def load(self) -> None:
        """Loads the index and answers with it from then on. Raises RLFlowError."""
        index = await self._read({})
        if self.state != "stopping":
            self._serve(index)

    async def reload(self, changes: Mapping[str, Any]) -> ServedIndex:
        """Loads the index anew while the present one goes on answering, and exchanges it in one
        step; of several processes, each for one that has loaded it.

        Raises RLFlowError: nothing changes then. Raises NotServed while another reload is under
        way."""
        if self._reloading or self.state == "loading":
            raise NotServed("an index is being loaded already.", 409, 1)
        self._reloading = True
        try:
            index = await self._read(changes)
        except (RLFlowError, OSError) as problem:
            self.statistics.reloads.labels("failed").inc()
            logger.error("reload failed, the index stays as it is: %s", problem)
            raise
        finally:
            self._reloading = False
            self._report("ready", 1.0)
        if self._replace_all is None:
            self._serve(index)
        else:
            self._replace_all(changes)
        self.statistics.reloads.labels("done").inc()
        logger.info("reload done: %s", index.info.get("identity", ""))
        return index

    async def _read(self, changes: Mapping[str, Any]) -> ServedIndex:
        """The index, loaded in a thread. Raises RLFlowError."""
        loaded: concurrent.futures.Future[ServedIndex] = concurrent.futures.Future()
        loaded.set_running_or_notify_cancel()

        def work() -> None:
            try:
                loaded.set_result(self._load(changes, self._report, self.statistics.batch))
            except Exception as failure:  # noqa: BLE001 -- it is raised in the caller
                loaded.set_exception(failure)

        # A daemon thread: loading may take long and must not keep a server alive that is asked to
        # stop.
        start_daemon("search-load", work)
        return await asyncio.wrap_future(loaded)

    def _serve(self, index: ServedIndex) -> None:
        """From now on this one answers. What is being answered by the former one ends on that."""
        self.index = index
        self.state = "ready"
        self._report("ready", 1.0)
        self.statistics.ready.set(1)

    def fail(self, problem: Exception) -> None:
        """Records that the first index could not be loaded."""
        self.state, self.problem = "failed", problem

    def stop(self) -> None:
        """From now on the server says that it is not ready."""
        self.state = "stopping"
        self.statistics.ready.set(0)

    def _report(self, stage: str, share: float) -> None:
        if stage != self.stage:
            logger.info("%s ...", stage)
        self.stage, self.share = stage, share
        self.statistics.loaded.set(share)

    # ------------------------------------------------------------ answering

    async def retrieve(
        self,
        request: RetrieveRequest,
        *,
        trace: str = "",
        wait_s: float | None = None,
        client: str = "",
    ) -> Answer:
        """The answer to a search request. wait_s: how long its client waits. client: its address.

        Raises NotServed, TimeoutError, and what the retriever raises."""
        index = self._ready()
        top_k = self._top_k(request.top_k, index)
        start = time.perf_counter()
        try:
            wait_s = min(wait_s or self.limits.max_wait_s, self.limits.max_wait_s)
            answer = await index.answer(request.queries, top_k, wait_s, client)
        except QueueFullError as problem:
            seconds = index.coalesced.seconds_to_empty
            raise NotServed(str(problem), 429, max(1, min(30, round(seconds)))) from None
        seconds = time.perf_counter() - start
        self.statistics.answered(answer, seconds)
        if self.query_log is not None:
            self.query_log.write(trace, request.queries, top_k, answer, seconds)
        return answer

    def access(self, urls: list[str]) -> tuple[list[bytes | None], str]:
        """The page of each URL, None for an unknown one; all None where no pages are loaded; and
        the index's identity. Raises NotServed."""
        index = self._ready()
        pages = index.pages
        return [None if pages is None else pages.page(url) for url in urls], index.identity

    def _ready(self) -> ServedIndex:
        if self.index is None:
            raise NotServed(f"not ready: {self.stage}, {self.share:.0%} done.", 503, 1)
        return self.index

    def _top_k(self, asked: int | None, index: ServedIndex) -> int:
        top_k = asked or self.limits.top_k
        if index.size is not None:
            top_k = min(top_k, index.size)
        if top_k > self.limits.max_top_k:
            raise NotServed(f"topk: at most {self.limits.max_top_k}, found {top_k}.")
        return top_k

    # ------------------------------------------------------------ reports

    @property
    def state_of_all(self) -> str:
        """The server's: it is ready when all of its processes are; later one of them may be
        replaced."""
        started = self.shared is None or self.shared.started()
        return self.state if started or self.state != "ready" else "loading"

    def health(self) -> dict[str, Any]:
        """What `GET /health` answers: always, at once."""
        report: dict[str, Any] = {
            "status": self.state_of_all,
            "stage": self.stage,
            "progress": round(self.share, 3),
            "pages": bool(self.index and self.index.pages),
            "uptime_s": round(time.monotonic() - self.started, 1),
        }
        if self.problem is not None:
            report["problem"] = str(self.problem)
        return {**report, **(self.shared.report() if self.shared else {})}

    def info(self) -> dict[str, Any]:
        """What `GET /info` answers: what is served, by hash."""
        served = self.index.info if self.index else {}
        return {"status": self.state_of_all, "topk": self.limits.top_k, **served}

    def tell(self, connections: int) -> None:
        """Tells Prometheus and the other processes what this one does."""
        waiting = self.index.coalesced.waiting if self.index else 0
        self.statistics.waiting.set(waiting)
        if self.shared is not None:
            self.shared.tell(connections=connections, waiting=waiting, ready=self.state == "ready")
