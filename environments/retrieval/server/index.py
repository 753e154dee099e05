"""One loaded index: searched in batches by one thread, its answers cached."""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlflow_environments.retrieval.coalescer import CoalescedSearch, Key
from rlflow_environments.retrieval.corpus import Corpus, Pages
from rlflow_environments.retrieval.encoders import NgramEncoder
from rlflow_environments.retrieval.indices import CorpusRetriever, Retriever
from rlflow_environments.retrieval.indices.base import SHORT
from rlflow_environments.retrieval.indices.dense import DenseIndex
from rlflow_environments.retrieval.records import dump_json
from rlflow_environments.retrieval.server.wire import Hit

HERE_S = 0.004  # the longest batch that the event loop searches itself: all requests wait for it
ENTRY_BYTES = 400  # what one cached answer costs beside its documents
LOOK_S = 0.1


class DocumentSearch:
    """Searches a batch for documents as they are sent: the stored record where the corpus has one,
    else the passage's fields.

    A short scan takes one thread: further ones would mostly wait for each other, and for cores that
    clients hold. A model as encoder takes all that the process may use."""

    def __init__(self, retriever: Retriever) -> None:
        self._retriever = retriever
        index = retriever.index if isinstance(retriever, CorpusRetriever) else None
        self._short = (
            isinstance(index, DenseIndex)
            and isinstance(index.encoder, NgramEncoder)
            and index.scanned * index.dimensions <= SHORT
        )

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """See Retriever.search."""
        retriever = self._retriever
        use_threads(1 if self._short else own_threads())
        if isinstance(retriever, CorpusRetriever) and isinstance(retriever.corpus, Corpus):
            document, found = retriever.corpus.document, retriever.rank(queries, top_k)
            return [[(document(row), float(score)) for row, score in ranked] for ranked in found]
        results = retriever.search(queries, top_k)
        return [[(dump_json(hit.fields), float(hit.score)) for hit in hits] for hits in results]


def own_threads() -> int:
    """How many this process may use: OMP_NUM_THREADS, else a thread per core."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return int(threads) if threads.isdecimal() else len(os.sched_getaffinity(0))


def use_threads(count: int) -> None:
    """How many threads the searches of the calling thread use from now on: OpenMP counts for each
    thread that calls it."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(count)
    if "faiss" in sys.modules:
        sys.modules["faiss"].omp_set_num_threads(count)


class AnswerCache:
    """The latest answers by (query, top_k), up to a number of bytes. Used in one thread."""

    def __init__(self, limit: int) -> None:
        """limit: bytes; 0 keeps nothing."""
        self._limit = limit
        self._bytes = 0
        self._answers: OrderedDict[Key, list[Hit]] = OrderedDict()

    def get(self, key: Key) -> list[Hit] | None:
        """The answer, which counts as used now; None where it is not known."""
        hits = self._answers.get(key)
        if hits is not None:
            self._answers.move_to_end(key)
        return hits

    def put(self, key: Key, hits: list[Hit]) -> None:
        """Keeps an answer; those that were not used for the longest time make room."""
        if not self._limit or key in self._answers:
            return
        self._answers[key] = hits
        self._bytes += _size(key, hits)
        while self._bytes > self._limit:
            self._bytes -= _size(*self._answers.popitem(last=False))


def _size(key: Key, hits: list[Hit]) -> int:
    return ENTRY_BYTES + len(key[0]) + sum(len(document) for document, _ in hits)


@dataclass(frozen=True)
class Answer:
    """Hits per query, in order, and how they came about: times in seconds, counts of queries, the
    identity of the index."""

    results: list[list[Hit]]
    waited_s: float = 0.0
    searched_s: float = 0.0
    cached: int = 0
    shared: int = 0
    index: str = ""


class ServedIndex:
    """A retriever with its pages, ready to answer. What is being answered when another index takes
    over ends on this one."""

    def __init__(
        self,
        retriever: Retriever,
        *,
        pages: Pages | None = None,
        info: Mapping[str, Any] | None = None,
        max_batch: int = 256,
        max_waiting: int | None = 8192,
        cache_bytes: int = 64 << 20,
        on_batch: Callable[[int, float], None] | None = None,
    ) -> None:
        """info: what `GET /info` says of it. on_batch: called with the size and seconds of every
        batch, in the index's thread."""
        self.pages = pages
        self.info = dict(info or {})
        self.identity = str(self.info.get("identity", ""))
        corpus = getattr(retriever, "corpus", None)
        self.size = len(corpus) if corpus is not None else None
        self._cache = AnswerCache(cache_bytes)
        self._due: dict[asyncio.Future[Any], float] = {}
        self._looking: asyncio.AbstractEventLoop | None = None
        self.coalesced: CoalescedSearch[Hit] = CoalescedSearch(
            DocumentSearch(retriever),
            max_batch=max_batch,
            max_waiting=max_waiting,
            on_batch=on_batch,
            here_s=HERE_S if isinstance(retriever, CorpusRetriever) else 0.0,
        )

    async def answer(
        self, queries: Sequence[str], top_k: int, wait_s: float = math.inf, client: str = ""
    ) -> Answer:
        """The hits of every query, within `wait_s` seconds, or 0.1 s later. client: its address,
        for taking turns. Raises QueueFullError, TimeoutError, what the retriever raises."""
        results = [self._cache.get((query, top_k)) for query in queries]
        places = [place for place, hits in enumerate(results) if hits is None]
        if not places:
            return Answer(results, cached=len(queries), index=self.identity)
        call = self.coalesced.submit([queries[place] for place in places], top_k, client)
        loop = call.loop
        if self._looking is not loop:
            self._looking = loop
            loop.call_later(LOOK_S, self._look, loop)
        self._due[call.done] = loop.time() + wait_s
        try:
            found = await call.done
        finally:
            del self._due[call.done]
        for place, hits in zip(places, found, strict=True):
            results[place] = hits
            self._cache.put((queries[place], top_k), hits)
        cached = len(queries) - len(places)
        waited, searched = call.waited_s, call.searched_s
        return Answer(results, waited, searched, cached, call.shared, self.identity)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ends what is overdue: with a timer for each, a tenth fewer requests are answered."""
        now = loop.time()
        for future, due in self._due.items():
            if due <= now and not future.done():
                future.set_exception(TimeoutError())
        if self._due:
            loop.call_later(LOOK_S, self._look, loop)
        else:
            self._looking = None
