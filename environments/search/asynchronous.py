"""Retrievers that wait instead of compute: they are asked one query at a time, many at once, and not in batches."""

from __future__ import annotations

from abc import abstractmethod

from rlflow_environments.search.formats import Passage
from rlflow_environments.search.retrievers import Retriever


class AsyncRetriever(Retriever):
    """A retriever whose searches are somebody else's work. Callers may live in any thread and any event loop."""

    @abstractmethod
    async def find(self, query: str, top_k: int, *, trace: str = "") -> list[Passage]:
        """At most `top_k` passages, best first. trace: see `trace.trace_id`."""
