"""Many concurrent searches as few batches."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from rlflow_environments.search.formats import Passage
from rlflow_environments.search.retrievers import Retriever


@dataclass(eq=False)
class _Request:
    query: str
    top_k: int
    found: Future[list[Passage]] = field(default_factory=Future)


class CoalescedSearch:
    """Searches one query at a time for its callers, in batches for the retriever.

    One thread owns the retriever: what arrives while it searches is the next batch, so nobody ever waits for a batch to fill.
    No request can see another: a batch has one top_k, equal queries are searched once but answered with lists of their own, and
    when a batch fails each of its requests is searched again alone, so that only the one that is at fault fails.
    Callers may live in any thread and any event loop.
    """

    def __init__(self, retriever: Retriever, *, max_batch: int = 64) -> None:
        self._retriever = retriever
        self._max_batch = max_batch
        self._waiting: deque[_Request] = deque()
        self._lock = threading.Lock()
        # One thread forms batches, the other searches them. Both start with the first search and end when this object is
        # garbage or the interpreter exits.
        self._owner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="search-batches")
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="search")

    async def search(self, query: str, top_k: int) -> list[Passage]:
        """At most `top_k` passages, best first. What the retriever raises for this query is raised here."""
        request = _Request(query, top_k)
        with self._lock:
            self._waiting.append(request)
        self._owner.submit(self._serve)
        return await asyncio.wrap_future(request.found)

    def _serve(self) -> None:
        """Searches one batch; there is one call per request, so nothing is left behind and late calls find nothing to do."""
        batch = self._take()
        if batch:
            self._answer(batch)

    def _take(self) -> list[_Request]:
        """The oldest request and those behind it with the same top_k, without those whose callers went away."""
        batch: list[_Request] = []
        with self._lock:
            while self._waiting and len(batch) < self._max_batch:
                if batch and self._waiting[0].top_k != batch[0].top_k:
                    break
                request = self._waiting.popleft()
                if request.found.set_running_or_notify_cancel():
                    batch.append(request)
        return batch

    def _answer(self, batch: list[_Request]) -> None:
        queries = list(dict.fromkeys(request.query for request in batch))
        attempt = self._worker.submit(self._retriever.search, queries, batch[0].top_k)
        problem = attempt.exception()  # waits
        if problem is None:
            results = dict(zip(queries, attempt.result(), strict=True))
            for request in batch:
                request.found.set_result(list(results[request.query]))
        elif len(batch) == 1:
            batch[0].found.set_exception(problem)
        else:
            for request in batch:
                self._answer([request])
