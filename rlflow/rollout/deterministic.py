"""Deterministic generation: seeds that nothing but the place of a turn decides; and whole rounds
for the engine in a fixed order, whatever the timing of the environment."""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from rlflow.rollout.engine import Completion, Engine, Sampling

RoundRequest = tuple[str, Sequence[int], Sampling, int, "asyncio.Future[Completion]"]
"""(id, tokens, sampling, priority, where the completion goes)."""


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
        self._pending: list[RoundRequest] = []
        self._round: asyncio.Task[None] | None = None
        self._tasks: dict[str, asyncio.Task[Completion]] = {}

    async def generate(
        self, tokens: Sequence[int], sampling: Sampling, request_id: str, priority: int = 0
    ) -> Completion:
        """Waits for the round to be complete, then for the completion."""
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        request = (request_id, tokens, sampling, priority, future)
        self._pending.append(request)
        self._start_if_complete()
        try:
            return await future
        finally:
            # Of an episode that was given up while others were waited for: its place comes with
            # another request.
            self._pending = [other for other in self._pending if other is not request]
            task = self._tasks.pop(request_id, None)
            if task is not None:
                task.cancel()  # of no effect where it is done; else nobody waits for it any longer

    def leave(self) -> None:
        """An episode is over: another one takes its place, or nobody waits for it any longer."""
        self._left -= 1
        self._start_if_complete()

    def _start_if_complete(self) -> None:
        if self._pending and len(self._pending) == min(self._left, self._engine.max_concurrency):
            requests = sorted(self._pending, key=lambda request: request[0])
            self._pending = []
            self._round = asyncio.get_running_loop().create_task(self._run(requests))

    async def _run(self, requests: list[RoundRequest]) -> None:
        tasks: list[asyncio.Task[Completion]] = []
        await self._engine.pause("keep")
        try:
            for request_id, tokens, sampling, priority, future in requests:
                task = asyncio.ensure_future(
                    self._engine.generate(tokens, sampling, request_id, priority)
                )
                task.add_done_callback(functools.partial(_hand_over, future))
                tasks.append(task)
                self._tasks[request_id] = task
            await asyncio.sleep(0)  # every request has reached the engine's queue
        finally:
            await self._engine.resume()
        await asyncio.gather(*tasks, return_exceptions=True)


def _hand_over(future: asyncio.Future[Completion], task: asyncio.Task[Completion]) -> None:
    if future.done():
        return
    if task.cancelled():
        future.cancel()
    elif (error := task.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())
