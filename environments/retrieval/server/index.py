"""One loaded index: searched in batches by one thread, its answers cached."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlflow_environments.retrieval.coalescer import CoalescedSearch, Key
from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.retrieval.indices import CorpusRetriever, Retriever
from rlflow_environments.retrieval.server.deadlines import Deadlines
from rlflow_environments.retrieval.server.records import Pages, StoredCorpus, dump_json
from rlflow_environments.retrieval.server.threads import is_short, own_threads, use_threads
from rlflow_environments.retrieval.server.wire import Hit

HERE_S = 0.004  # the longest batch that the event loop searches itself: all requests wait for it
ENTRY_BYTES = 400  # what one cached answer costs beside its documents


class DocumentSearch:
    """Searches a batch for documents as they are sent: the stored record where the corpus has one,
    else the passage's fields."""

    def __init__(self, retriever: Retriever) -> None:
        self._retriever = retriever
        self._short = is_short(retriever)

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """See Retriever.search."""
        retriever = self._retriever
        use_threads(1 if self._short else own_threads())
        if isinstance(retriever, CorpusRetriever) and isinstance(retriever.corpus, StoredCorpus):
            document = retriever.corpus.document
            rankings = retriever.rank(queries, top_k)
            return [
                [(document(row), float(score)) for row, score in ranking] for ranking in rankings
            ]
        return [
            [(_document(p), float(p.score)) for p in passages]
            for passages in retriever.search(queries, top_k)
        ]


def _document(passage: Passage) -> bytes:
    return dump_json(
        {"id": passage.id, "title": passage.title, "contents": passage.contents, "url": passage.url}
    )


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
        self.has_pages = pages is not None
        self.info = dict(info or {})
        self._identity = str(self.info.get("identity", ""))
        self._pages = pages
        corpus = getattr(retriever, "corpus", None)
        self.size = len(corpus) if corpus is not None else None
        self._cache = AnswerCache(cache_bytes)
        self._deadlines = Deadlines()
        self._search: CoalescedSearch[Hit] = CoalescedSearch(
            DocumentSearch(retriever),
            max_batch=max_batch,
            max_waiting=max_waiting,
            on_batch=on_batch,
            here_s=HERE_S if isinstance(retriever, CorpusRetriever) else 0.0,
        )

    @property
    def waiting(self) -> int:
        """How many searches wait for their batch."""
        return self._search.waiting

    def page(self, url: str) -> bytes | None:
        """The page of a URL; None for an unknown one, and where no pages are loaded."""
        return self._pages.page(url) if self._pages is not None else None

    async def answer(self, queries: Sequence[str], top_k: int, wait_s: float = math.inf) -> Answer:
        """The hits of every query, within `wait_s` seconds. Raises QueueFullError, TimeoutError,
        what the retriever raises."""
        results = [self._cache.get((query, top_k)) for query in queries]
        places = [place for place, hits in enumerate(results) if hits is None]
        if not places:
            return Answer(results, cached=len(queries), index=self._identity)
        call = self._search.submit([queries[place] for place in places], top_k)
        for place, hits in zip(places, await self._deadlines.wait(call.done, wait_s), strict=True):
            results[place] = hits
            self._cache.put((queries[place], top_k), hits)
        cached = len(queries) - len(places)
        waited, searched = call.waited_s, call.searched_s
        return Answer(results, waited, searched, cached, call.shared, self._identity)
