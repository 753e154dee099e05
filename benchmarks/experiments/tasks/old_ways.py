"""The demo's search as older systems play it: turns in step, a session per search, text that is encoded again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp

from rlflow.errors import ConfigError
from rlflow.net.http import Reply
from rlflow.types import Episode, Step, Task
from rlflow_environments.retrieval.client.answers import read_passages
from rlflow_environments.retrieval.client.asynchronous import AsyncRetriever
from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.search.environment import SearchEnvironment
from rlflow_environments.search.lookups import Lookups

REFERENCE = f"{Path(__file__).resolve()}:OldWays"


class SessionPerSearch(AsyncRetriever):
    """Asks a server over a connection that is made for the search and closed behind it."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/retrieve"

    def search(self, queries: Any, top_k: int) -> list[list[Passage]]:
        return [asyncio.run(self.find(query, top_k)) for query in queries]

    async def find(self, query: str, top_k: int, *, trace: str = "") -> list[Passage]:
        body = {"queries": [query], "topk": top_k, "return_scores": True}
        async with aiohttp.ClientSession() as session, session.post(self._url, json=body) as answer:
            reply = Reply(answer.status, answer.headers, await answer.read())
        return read_passages(self._url, reply, 1, top_k)[0]

    async def page(self, url: str, *, trace: str = "") -> str | None:
        raise ConfigError("this retriever has no pages")


class Together:
    """A turn begins when all episodes that are open have ended the one before."""

    def __init__(self) -> None:
        self._open = self._waiting = 0
        self._all = asyncio.Event()

    def enter(self) -> None:
        self._open += 1

    def leave(self) -> None:
        self._open -= 1
        self._look()

    async def turn(self) -> None:
        """Returns when all are here."""
        self._waiting += 1
        event = self._all
        self._look()
        await event.wait()

    def _look(self) -> None:
        if self._waiting and self._waiting >= self._open:
            self._all.set()
            self._all, self._waiting = asyncio.Event(), 0


class OldWays(SearchEnvironment):
    """in_step: an episode's turn waits for all others. sessions: one per search. encode_again: each turn is a prompt of its own,
    the text of all before it encoded anew, as a row of its own."""

    def __init__(
        self,
        *,
        in_step: bool = False,
        sessions: bool = False,
        encode_again: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(managed=True, **options)
        self._together = Together() if in_step else None
        self._encode_again = encode_again
        if sessions:
            assert self._service is not None
            self._lookups = Lookups(
                SessionPerSearch(self._service.client["urls"]), options.get("top_k", 3)
            )

    async def reset(self, task: Task) -> Episode:
        if self._together is not None:
            self._together.enter()
        return await super().reset(task)

    async def step(self, episode: Episode, response: str) -> Step:
        if self._together is not None:
            await self._together.turn()
        step = await super().step(episode, response)
        if self._encode_again and not step.terminated and isinstance(step.observation, str):
            text = episode.scratch.setdefault("text", str(episode.task.prompt))
            episode.scratch["text"] = step.observation = f"{text}{response}{step.observation}"
            step.after = -1  # a prompt
        return step

    async def close(self, episode: Episode) -> None:
        await super().close(episode)
        if self._together is not None:
            self._together.leave()
