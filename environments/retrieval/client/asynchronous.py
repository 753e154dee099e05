"""Retrievers that wait instead of compute: they are asked one query at a time, many at once, and
not in batches."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Sequence

from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.retrieval.indices import Retriever

TRACE_HEADER = "X-Trace-Id"
INDEX_HEADER = "X-Index"
DEADLINE_HEADER = "X-Deadline-S"
"""How long the client waits for an answer, in seconds: the server does not search for one that
nobody waits for."""


class AsyncRetriever(Retriever):
    """A retriever whose searches run elsewhere. Callers may live in any thread and any event
    loop."""

    @abstractmethod
    async def find(self, query: str, top_k: int, *, trace: str = "") -> list[Passage]:
        """At most `top_k` passages, best first. trace: see `trace_id`."""

    @abstractmethod
    async def page(self, url: str, *, trace: str = "") -> str | None:
        """The text of a page, None for an unknown one."""

    def take_cache_counts(self) -> tuple[int, int]:
        """(searches looked up in its cache, those that it held) since the last call."""
        return 0, 0


def trace_id(task_id: str, responses: Sequence[str]) -> str:
    """The id of the search that the last response asks for: 16 hex digits of the task and of what
    the policy wrote so far.

    It is a function of the recorded trajectory, so it needs no place in it: that of turn n is
    `trace_id(trajectory.task_id, [turn.response for turn in trajectory.turns[: n + 1]])`.
    """
    digest = hashlib.blake2b(digest_size=8)
    for text in (task_id, *responses):
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
