"""Retrievers that wait instead of compute: they are asked one query at a time, many at once, and
not in batches."""

from __future__ import annotations

import threading
from abc import abstractmethod

from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.retrieval.indices import Retriever


class CacheCounts:
    """How many searches were looked up in a cache, and how many of them it held."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._looked_up = self._held = 0

    def add(self, looked_up: int, held: int) -> None:
        """Counts searches."""
        with self._lock:
            self._looked_up += looked_up
            self._held += held

    def take(self) -> tuple[int, int]:
        """(looked up, held) since the last call."""
        with self._lock:
            taken = self._looked_up, self._held
            self._looked_up = self._held = 0
        return taken


class AsyncRetriever(Retriever):
    """A retriever whose searches run elsewhere. Callers may live in any thread and any event
    loop."""

    cache_counts: CacheCounts | None = None
    """Of its cache, if it has one."""

    @abstractmethod
    async def find(self, query: str, top_k: int, *, trace: str = "") -> list[Passage]:
        """At most `top_k` passages, best first. trace: see `trace.trace_id`."""

    @abstractmethod
    async def page(self, url: str, *, trace: str = "") -> str | None:
        """The text of a page, None for an unknown one."""
