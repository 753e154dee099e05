"""Everything that an episode looks up: passages and pages, through whatever stands behind them,
counted."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlflow.errors import ConfigError
from rlflow.types import Episode
from rlflow_environments.common.threads import beside_the_loop
from rlflow_environments.retrieval.client.asynchronous import AsyncRetriever, trace_id
from rlflow_environments.retrieval.coalescer import CoalescedSearch
from rlflow_environments.retrieval.corpus import Pages, Passage
from rlflow_environments.retrieval.indices import Retriever
from rlflow_environments.search.protocols import Call, Result
from rlflow_environments.search.rewards import scoring

logger = logging.getLogger(__name__)


class Lookups:
    """Carries out the calls of episodes. Whatever the retriever raises escapes: the episode is
    aborted."""

    def __init__(self, retriever: Retriever, top_k: int, pages: str | Path | None = None) -> None:
        """pages: a pages.jsonl; without one a server is asked."""
        self._retriever = retriever
        self._remote = retriever if isinstance(retriever, AsyncRetriever) else None
        self._top_k = top_k
        self._pages = None if pages is None else Pages(pages)
        self._coalesced: CoalescedSearch[Passage] = CoalescedSearch(retriever)
        self._account = _Account()

    def check_tools(self, tools: Sequence[str]) -> None:
        """Raises ConfigError if pages may be accessed and nothing has them; warns of pages that
        nobody may access."""
        if "access" not in tools:
            if self._pages is not None:
                logger.warning(
                    "environment.pages is given, but the policy is not offered the tool access: "
                    "set environment.tools"
                )
        elif self._pages is None and self._remote is None:
            raise ConfigError(
                "environment.tools: access needs pages. Set environment.pages to a .jsonl file of "
                "{url, contents}, or search in a server that has them (retriever http)."
            )

    async def carry_out(self, call: Call, episode: Episode) -> Result:
        """What a call brings."""
        trace = trace_id(episode.task.id, episode.scratch["responses"])
        with self._account.under_way():
            if call.tool == "access":
                return Result(call, pages=[await self._page(url, trace) for url in call.inputs])
            searches = [self._search(query, episode, trace) for query in call.inputs]
            return Result(call, passages=await asyncio.gather(*searches))

    def report(self) -> dict[str, float]:
        """The metrics of the searches since the last call."""
        taken = self._account.take()
        looked_up, held = (0, 0) if self._remote is None else self._remote.take_cache_counts()
        if looked_up:
            taken["search/hit_rate"] = held / looked_up
        return taken

    async def _search(self, query: str, episode: Episode, trace: str) -> list[Passage]:
        asked, golds = episode.scratch["queries"], episode.task.answer
        repeated = query in asked
        asked.add(query)
        if self._remote is not None:
            passages = await self._remote.find(query, self._top_k, trace=trace)
        else:
            passages = await self._coalesced.search(query, self._top_k)

        def has_gold() -> bool:
            return any(scoring.contains_gold(passage.contents, golds) for passage in passages)

        length = sum(len(passage.contents) for passage in passages)
        gold = await beside_the_loop(length, has_gold)
        self._account.book(empty=not passages, repeated=repeated, gold=gold)
        return passages

    async def _page(self, url: str, trace: str) -> str | None:
        if self._pages is not None:
            record = self._pages.page(url)
            return None if record is None else str(json.loads(record)["contents"])
        return None if self._remote is None else await self._remote.page(url, trace=trace)


class _Account:
    """Counts of searches, thread-safe, and the wall-clock time in which at least one was under
    way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = 0
        self._busy_since = self._busy_s = self._waited_s = 0.0
        self._counts: Counter[str] = Counter()

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Measures a search, or a page access, that somebody waits for."""
        started = time.perf_counter()
        with self._lock:
            if self._under_way == 0:
                self._busy_since = started
            self._under_way += 1
        try:
            yield
        finally:
            ended = time.perf_counter()
            with self._lock:
                self._under_way -= 1
                self._waited_s += ended - started
                if self._under_way == 0:
                    self._busy_s += ended - self._busy_since

    def book(self, *, empty: bool, repeated: bool, gold: bool) -> None:
        """Counts an answered search. empty: it found nothing; repeated: its episode had asked the
        same before; gold: a passage that it found holds a gold answer."""
        with self._lock:
            self._counts.update(
                searches=1, empty_rate=empty, duplicate_rate=repeated, gold_in_top_k=gold
            )

    def take(self) -> dict[str, float]:
        """The metrics since the last call; rates are missing where there was no search. Starts
        anew."""
        with self._lock:
            busy, waited, counts = self._busy_s, self._waited_s, self._counts
            self._busy_s, self._waited_s, self._counts = 0.0, 0.0, Counter()
            if self._under_way:
                now = time.perf_counter()
                busy, self._busy_since = busy + now - self._busy_since, now
        searches = counts.pop("searches", 0)
        taken = {"time/search_s": busy, "search/searches": float(searches)}
        if searches:
            taken["time/search_wait_s"] = waited / searches
            taken |= {f"search/{name}": count / searches for name, count in counts.items()}
        return taken
