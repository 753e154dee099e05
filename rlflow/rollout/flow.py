"""Attempts that start and end one by one, for as long as a run lasts. (`Submission` plays a list of them to its end.)"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol, Union

from rlflow.errors import RolloutError
from rlflow.rollout.continuation import Continued, Decode
from rlflow.rollout.engine import Completion, Engine, Sampling
from rlflow.rollout.episodes import Attempt, EpisodePlayer
from rlflow.rollout.event_loop import LoopThread, Running, cancel_all
from rlflow.types import Trajectory

FIRST_TURN = 1000
"""Priority of an attempt's first request, one less with each turn: who is nearest to the end goes first where an engine cannot
run all. Other requests, an evaluation's for one, come before them with 0."""


@dataclass(frozen=True)
class Begun:
    """An attempt got a place in its engine, whose weights are of this version or a later one. at: seconds since 1970. worker:
    that plays it, "" for this process."""

    request_id: str
    version: int
    at: float = 0.0
    worker: str = ""


@dataclass(frozen=True)
class Ended:
    """An attempt is over."""

    request_id: str
    trajectory: Trajectory
    at: float = 0.0


@dataclass(frozen=True)
class Lost:
    """An attempt is gone with the worker that played it, for that reason; nothing more is heard of it."""

    request_id: str
    worker: str
    reason: str
    at: float = 0.0


News = Union[Begun, Ended, Lost]

MOST_LOSSES = 20
"""Give up after this many lost workers: the attempt itself probably kills them."""


class Losses:
    """How often each attempt was lost with the worker that played it."""

    def __init__(self) -> None:
        self._counts: Counter[Hashable] = Counter()

    def add(self, attempt: Hashable, item: Lost) -> None:
        """Counts one more. Raises RolloutError where it is one too many."""
        self._counts[attempt] += 1
        if self._counts[attempt] > MOST_LOSSES:
            raise RolloutError(
                f"rollout: attempt {item.request_id} was lost {self._counts[attempt]} times, each time with the "
                f"worker that played it; last: {item.reason}. The attempt itself probably kills them: play its "
                "task alone with `rlflow env check`, or leave it out."
            )


class Flow(Protocol):
    """What plays attempts that are given one by one: `EpisodeFlow`, workers in other processes, or a simulation."""

    @property
    def poll_s(self) -> float:
        """How long to wait for news at a time."""

    def start(self, attempt: Attempt, lane: int) -> None:
        """Plays the attempt; those of one lane are played together where that is possible."""

    def news(self, timeout_s: float = 0.0) -> list[News]:
        """What has happened since the last call, waited for at most that long; nothing of attempts that were cancelled."""

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Ends attempts in flight; nothing is heard of them any more."""

    def close(self) -> None:
        """Ends all attempts."""


class EpisodeFlow:
    """Plays attempts as they are given; they proceed whether or not anybody asks for news, also while the caller trains. Each
    engine plays as many at a time as it says are worth it, in the order in which they came.

    version: of the weights that the engines have. decode: token ids -> text, for requests that a weight update interrupts.
    priority: of all requests, for others than training's; None: the nearer to the end of its episode, the earlier. wake: called,
    in any thread, when there is news."""

    def __init__(
        self,
        thread: LoopThread,
        engines: Sequence[Engine],
        player: EpisodePlayer,
        version: Callable[[], int],
        decode: Decode,
        priority: int | None = None,
        wake: Callable[[], object] = lambda: None,
    ) -> None:
        self._thread = thread
        self._engines = engines
        self._generates = [Continued(engine, decode).generate for engine in engines]
        self._places = [asyncio.Semaphore(engine.max_concurrency) for engine in engines]
        self._player = player
        self._version = version
        self._priority = priority
        self._wake = wake
        self._watch = thread.watch(player.call_s)
        self._news: SimpleQueue[Begun | tuple[str, float]] = SimpleQueue()  # id and time of an attempt that is over
        self._running: dict[str, Running[Trajectory]] = {}

    def start(self, attempt: Attempt, lane: int) -> None:
        """Plays the attempt, on the engine of that number, counted on beyond the last one."""
        running = self._thread.start(self._play(attempt, lane % len(self._engines)))
        self._running[attempt.request_id] = running
        running.on_end(lambda: self._tell((attempt.request_id, time.time())))

    def news(self, timeout_s: float = 0.0) -> list[News]:
        """What has happened since the last call, waited for at most that long; nothing of attempts that were cancelled. Raises
        what was wrong with the set-up, and RolloutError where the event loop does not turn any more."""
        found: list[News] = []
        try:
            item = self._news.get(timeout=timeout_s) if timeout_s > 0 else self._news.get_nowait()
            while True:
                found += self._told(item)
                item = self._news.get_nowait()
        except Empty:
            if timeout_s >= self._watch.poll_s and not found:
                self._watch.check()
        return found

    @property
    def poll_s(self) -> float:
        """How long to wait for news at a time."""
        return self._watch.poll_s

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Ends attempts in flight, and waits for their clean-up; nothing is heard of them any more."""
        cancel_all([self._running.pop(name) for name in request_ids if name in self._running])

    def close(self) -> None:
        """Ends all attempts."""
        self.cancel(list(self._running))

    def _tell(self, item: Begun | tuple[str, float]) -> None:
        self._news.put(item)
        self._wake()

    def _told(self, item: Begun | tuple[str, float]) -> list[News]:
        if isinstance(item, Begun):
            return [item] if item.request_id in self._running else []
        name, at = item
        running = self._running.pop(name, None)
        return [] if running is None else [Ended(name, running.result(), at)]

    async def _play(self, attempt: Attempt, lane: int) -> Trajectory:
        engine, generate, turns = self._engines[lane], self._generates[lane], itertools.count()

        def by_turn(tokens: Sequence[int], sampling: Sampling, request_id: str) -> Awaitable[Completion]:
            place = max(1, FIRST_TURN - next(turns)) if self._priority is None else self._priority
            return generate(tokens, sampling, request_id, priority=place)

        async with self._places[lane]:
            self._tell(Begun(attempt.request_id, self._version(), time.time()))
            try:
                return await self._player.play(attempt, by_turn)
            finally:
                engine.release(attempt.request_id)
