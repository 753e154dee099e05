"""Everything that an episode looks up: passages and pages, through whatever stands behind them, counted."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlflow.errors import ConfigError
from rlflow.types import Episode
from rlflow_environments.common.threads import beside_the_loop
from rlflow_environments.retrieval.client.asynchronous import AsyncRetriever
from rlflow_environments.retrieval.client.trace import trace_id
from rlflow_environments.retrieval.coalescer import CoalescedSearch
from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.retrieval.indices import Retriever
from rlflow_environments.search.accounting import SearchAccount
from rlflow_environments.search.disturbances import Disturbances
from rlflow_environments.search.protocols import Call, Result
from rlflow_environments.search.rewards import scoring

if TYPE_CHECKING:
    from rlflow_environments.retrieval.server.records import Pages

logger = logging.getLogger("rlflow.search.lookups")  # under `rlflow`, so that a run's log has it


class Lookups:
    """Carries out the calls of episodes. Whatever the retriever raises escapes: the episode is aborted."""

    def __init__(
        self,
        retriever: Retriever,
        top_k: int,
        *,
        pages: str | Path | None = None,
        disturbances: Disturbances | None = None,
        questions: Sequence[str] = (),
    ) -> None:
        """pages: a pages.jsonl; without one a server is asked. questions: what noise is searched with."""
        self._retriever = retriever
        self._top_k = top_k
        self._pages = None if pages is None else _open_pages(pages)
        self._disturbances = disturbances
        self._questions = questions
        self._coalesced: CoalescedSearch[Passage] = CoalescedSearch(retriever)
        self._account = SearchAccount()

    def check_tools(self, tools: Sequence[str]) -> None:
        """Raises ConfigError if pages may be accessed and nothing has them; warns of pages that nobody may access."""
        if "access" not in tools:
            if self._pages is not None:
                logger.warning(
                    "environment.pages is given, but the policy is not offered the tool access: set environment.tools"
                )
        elif self._pages is None and not isinstance(self._retriever, AsyncRetriever):
            raise ConfigError(
                "environment.tools: access needs pages. Set environment.pages to a .jsonl file of {url, contents}, or search in "
                "a server that has them (retriever http)."
            )

    async def carry_out(self, call: Call, episode: Episode, split: str | None) -> Result:
        """What a call brings. split: of the episode's task, for the disturbances."""
        trace = trace_id(episode.task.id, episode.scratch["responses"])
        with self._account.under_way():
            if call.tool == "access":
                return Result(call, pages=[await self._page(url, trace) for url in call.inputs])
            searches = [self._search(query, episode, split, trace) for query in call.inputs]
            return Result(call, passages=await asyncio.gather(*searches))

    def report(self) -> dict[str, float]:
        """The metrics of the searches since the last call."""
        taken = self._account.take()
        counts = self._retriever.cache_counts if isinstance(self._retriever, AsyncRetriever) else None
        looked_up, held = counts.take() if counts is not None else (0, 0)
        if looked_up:
            taken["search/hit_rate"] = held / looked_up
        return taken

    async def _search(self, query: str, episode: Episode, split: str | None, trace: str) -> list[Passage]:
        state = episode.scratch
        asked_before = state["queries"].get(query, 0)
        state["queries"][query] = asked_before + 1

        async def find(text: str, top_k: int) -> list[Passage]:
            if isinstance(self._retriever, AsyncRetriever):
                return await self._retriever.find(text, top_k, trace=trace)
            return await self._coalesced.search(text, top_k)

        disturbances = self._disturbances
        if disturbances is not None and split in disturbances.splits:
            passages, changed = await disturbances.search(
                find, query, self._top_k, task_id=episode.task.id, asked_before=asked_before, others=self._questions
            )
            state["disturbed"] += changed
        else:
            passages = await find(query, self._top_k)
        length = sum(len(passage.contents) for passage in passages)
        gold = await beside_the_loop(
            length, lambda: any(scoring.contains_gold(passage.contents, episode.task.answer) for passage in passages)
        )
        self._account.book(empty=not passages, repeated=asked_before > 0, gold=gold)
        return passages

    async def _page(self, url: str, trace: str) -> str | None:
        if self._pages is None:
            if not isinstance(self._retriever, AsyncRetriever):
                return None
            return await self._retriever.page(url, trace=trace)
        record = self._pages.page(url)
        return None if record is None else str(json.loads(record)["contents"])


def _open_pages(path: str | Path) -> Pages:
    from rlflow_environments.retrieval.server.records import Pages

    return Pages(path)
