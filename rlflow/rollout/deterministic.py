"""Deterministic generation: seeds that nothing but the place of a turn decides; and whole rounds
for the engine in a fixed order, whatever the timing of the environment."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from rlflow.rollout.engine import Completion, Engine, Sampling


@dataclass(frozen=True)
class TurnSeeds:
    """Maps turns of an attempt to seeds of 63 bits; the group's id holds step and task."""

    seed: int
    group_id: str
    attempt: int

    def __call__(self, turn: int) -> int:
        text = f"{self.seed}/{self.group_id}/{self.attempt}/{turn}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class Rounds:
    """Collects the requests of all episodes in flight, then hands them to the engine in the order
    of their ids.

    A request that arrived sooner or later than in another run so meets the same batch there: equal
    inputs give equal bits."""

    def __init__(self, engine: Engine, episodes: int) -> None:
        """episodes: how many will be played in all, as many at a time as the engine has places."""
        self._engine = engine
        self._left = episodes
        self._pending: list[tuple[str, asyncio.Future[None]]] = []
        self._round: asyncio.Task[None] | None = None

    async def generate(
        self, tokens: Sequence[int], sampling: Sampling, request_id: str, priority: int = 0
    ) -> Completion:
        """Waits for the round to be complete, then for the completion."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        request = (request_id, turn)
        self._pending.append(request)
        self._start_if_complete()
        try:
            await turn
        finally:
            # Of an episode that was given up while others were waited for: its place comes with
            # another request.
            self._pending = [other for other in self._pending if other is not request]
        return await self._engine.generate(tokens, sampling, request_id, priority)

    def leave(self) -> None:
        """An episode is over: another one takes its place, or nobody waits for it any longer."""
        self._left -= 1
        self._start_if_complete()

    def _start_if_complete(self) -> None:
        if self._pending and len(self._pending) == min(self._left, self._engine.max_concurrency):
            turns = [turn for _, turn in sorted(self._pending, key=itemgetter(0))]
            self._pending = []
            self._round = asyncio.get_running_loop().create_task(self._run(turns))

    async def _run(self, turns: Sequence[asyncio.Future[None]]) -> None:
        await self._engine.pause("keep")
        try:
            for turn in turns:
                if not turn.done():  # by the end of its episode
                    turn.set_result(None)
            await asyncio.sleep(0)  # every request has reached the engine's queue
        finally:
            await self._engine.resume()
