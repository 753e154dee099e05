"""Play attempts: on engines in this process, or on workers in others. Callers start them and hear
of them as events."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from queue import Empty, SimpleQueue
from typing import Any, Protocol, Union

from rlflow.errors import RolloutError
from rlflow.rollout.continuation import Continued, Decode
from rlflow.rollout.deterministic import Rounds
from rlflow.rollout.engine import Completion, Engine, Sampling
from rlflow.rollout.episodes import Attempt, EpisodePlayer
from rlflow.rollout.event_loop import LoopThread, Running, cancel_all
from rlflow.types import Trajectory

FIRST_TURN = 1000
"""Priority of an attempt's first request, one less with each turn: who is nearest to the end goes
first where an engine cannot run all. Other requests, an evaluation's for one, come before them with
0."""


@dataclass(frozen=True)
class Begun:
    """An attempt got a place in its engine, whose weights are of this version or a later one.
    worker: that plays it, "" for this process."""

    request_id: str
    version: int
    worker: str = ""


@dataclass(frozen=True)
class Ended:
    """An attempt is over."""

    request_id: str
    trajectory: Trajectory


@dataclass(frozen=True)
class Lost:
    """An attempt is gone with the worker that played it, for that reason."""

    request_id: str
    worker: str
    reason: str


Event = Union[Begun, Ended, Lost]


class Player(Protocol):
    """Plays attempts until they end or are cancelled."""

    @property
    def poll_s(self) -> float:
        """How long to wait for events at a time."""

    def start(self, attempts: Sequence[Attempt]) -> None:
        """Plays the attempts, none of whose request ids is in flight, in this order where there is
        no room for all at once."""

    def events(self, timeout_s: float = 0.0) -> list[Event]:
        """What has happened since the last call, waited for at most that long; nothing of attempts
        that were cancelled. Raises what was wrong with the set-up."""

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Ends attempts in flight; nothing is heard of them any more."""

    def close(self) -> None:
        """Ends all attempts."""


@dataclass(frozen=True)
class Failure:
    """What ended some attempts together, and is to reach whoever waits for one of them."""

    request_ids: Sequence[str]
    error: BaseException


class Inbox:
    """Events of the attempts that somebody waits for; those of others are dropped. Any thread may
    `put`. wake: called, in that thread, when there is something new."""

    def __init__(self, wake: Callable[[], object] = lambda: None) -> None:
        self.expected: set[str] = set()
        self._items: SimpleQueue[Sequence[Event | Failure]] = SimpleQueue()
        self._wake = wake

    def put(self, items: Sequence[Event | Failure]) -> None:
        """Adds items that are to be taken together."""
        self._items.put(items)
        self._wake()

    def take(self, timeout_s: float) -> list[Event]:
        """The events since the last call, waited for at most that long. Raises the error of a
        Failure."""
        found: list[Event] = []
        with suppress(Empty):
            while True:
                for item in self._items.get(timeout_s > 0, timeout_s):
                    found += self._wanted(item)
                timeout_s = 0.0
        return found

    def _wanted(self, item: Event | Failure) -> list[Event]:
        if isinstance(item, Failure):
            if not self.expected.isdisjoint(item.request_ids):
                raise item.error
            return []
        if item.request_id not in self.expected:
            return []
        if not isinstance(item, Begun):
            self.expected.discard(item.request_id)
        return [item]


Generate = Callable[..., Awaitable[Completion]]


class Seats:
    """The places of an engine, as many as it says are worth having, and how those who have one ask
    it."""

    def __init__(self, engine: Engine, generate: Generate) -> None:
        self.engine = engine
        self.generate = generate
        self.free = asyncio.Semaphore(engine.max_concurrency)


class LocalPlayer:
    """Plays attempts on engines in this process. They proceed whether or not anybody asks for
    events, also while the caller trains; each engine plays as many at a time as it says are worth
    it.

    version: of the weights that the engines have. decode: token ids -> text, for requests that a
    weight update interrupts. turn: given in deterministic runs, where the attempts of one `start`
    are played in whole rounds while no others are, and are cancelled together."""

    def __init__(
        self,
        thread: LoopThread,
        engines: Sequence[Engine],
        episodes: EpisodePlayer,
        *,
        version: Callable[[], int] = lambda: 0,
        decode: Decode = str,
        turn: asyncio.Lock | None = None,
        wake: Callable[[], object] = lambda: None,
    ) -> None:
        self._thread = thread
        self._engines = engines
        self._seats = [Seats(engine, Continued(engine, decode).generate) for engine in engines]
        self._episodes = episodes
        self._version = version
        self._turn = turn
        self._watch = thread.watch(episodes.limits.call_s)
        self._inbox = Inbox(wake)
        self._running: dict[str, Running[None]] = {}  # by request id
        self._places: dict[str, int] = {}  # the number of the engine

    @property
    def poll_s(self) -> float:
        """How long to wait for events at a time."""
        return self._watch.poll_s

    def start(self, attempts: Sequence[Attempt]) -> None:
        """Plays the attempts."""
        shares = self._shares(attempts)
        names = [attempt.request_id for attempt in attempts]
        self._inbox.expected.update(names)
        placed = [(attempt, place) for place, share in enumerate(shares) for attempt in share]
        if self._turn is not None:
            batch = self._told(names, self._play_in_rounds, shares, self._turn)
            running = [self._thread.start(batch)] * len(placed)
        else:
            plays = [
                self._told([one.request_id], self._play, one, self._seats[place])
                for one, place in placed
            ]
            running = self._thread.start_all(plays)
        for (attempt, place), one in zip(placed, running, strict=True):
            self._running[attempt.request_id] = one
            self._places[attempt.request_id] = place
            one.on_end(partial(self._running.pop, attempt.request_id, None))

    def events(self, timeout_s: float = 0.0) -> list[Event]:
        """What has happened since the last call. Raises what was wrong with the set-up, and
        RolloutError where the event loop does not turn any more."""
        found = self._inbox.take(timeout_s)
        if not found and timeout_s >= self.poll_s:
            self._watch.check()
        return found

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Ends attempts in flight and waits for their clean-up; nothing is heard of them any
        more."""
        names = list(request_ids)
        self._inbox.expected.difference_update(names)
        found = [self._running.get(name) for name in names]
        cancel_all([one for one in found if one is not None])

    def close(self) -> None:
        """Ends all attempts."""
        self.cancel(list(self._running))

    def _shares(self, attempts: Sequence[Attempt]) -> list[list[Attempt]]:
        """Which attempts each engine plays. Those at one task share their prompt's cache, so they
        stay together unless that left an engine without work."""
        # By what was heard, not by what runs: a deterministic round must not depend on the timing.
        self._places = {n: one for n, one in self._places.items() if n in self._inbox.expected}
        loads = Counter(self._places.values())
        groups = {attempt.group_id for attempt in attempts}
        whole = bool(loads) or len(groups) >= len(self._engines)
        shares: list[list[Attempt]] = [[] for _ in self._engines]
        key = attrgetter("group_id" if whole else "request_id")
        for _, together in itertools.groupby(attempts, key):
            chosen = min(range(len(shares)), key=lambda place: loads[place] + len(shares[place]))
            shares[chosen] += together
        return shares

    async def _told(
        self, names: Sequence[str], play: Callable[..., Awaitable[None]], *arguments: Any
    ) -> None:
        try:
            await play(*arguments)
        except asyncio.CancelledError:
            error = RolloutError(
                "rollout: the request of an attempt was cancelled, and not by who waits for it"
            )
            self._inbox.put([Failure(names, error)])
            raise
        except BaseException as error:  # noqa: BLE001 -- somebody waits for these attempts
            self._inbox.put([Failure(names, error)])

    async def _play(self, attempt: Attempt, seats: Seats) -> None:
        turns = itertools.count()

        def generate(
            tokens: Sequence[int], sampling: Sampling, request_id: str
        ) -> Awaitable[Completion]:
            by_turn = max(1, FIRST_TURN - next(turns))
            priority = by_turn if attempt.priority is None else attempt.priority
            return seats.generate(tokens, sampling, request_id, priority=priority)

        async with seats.free:
            self._inbox.put([Begun(attempt.request_id, self._version())])
            try:
                trajectory = await self._episodes.play(attempt, generate)
            finally:
                seats.engine.release(attempt.request_id)
        self._inbox.put([Ended(attempt.request_id, trajectory)])

    async def _play_in_rounds(
        self, shares: Sequence[Sequence[Attempt]], turn: asyncio.Lock
    ) -> None:
        async def play(attempt: Attempt, seats: Seats, rounds: Rounds) -> None:
            await self._play(attempt, seats)
            rounds.leave()

        async with turn:
            plays = []
            for engine, share in zip(self._engines, shares):
                rounds = Rounds(engine, len(share))
                seats = Seats(engine, rounds.generate)
                plays += [play(attempt, seats, rounds) for attempt in share]
            await _all(plays)


async def _all(coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Runs them together; the first failure cancels the others and is raised when they have
    ended."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class AttemptPool(Protocol):
    """Workers that play attempts; see `rlflow.cluster.pool.WorkerPool`."""

    def play(self, attempts: Sequence[Attempt], inbox: Inbox) -> None: ...

    def cancel(self, inbox: Inbox, request_ids: set[str]) -> None: ...

    def compare(self) -> None: ...


class RemotePlayer:
    """Plays attempts on the workers of a pool. together: one worker plays all of a `start`, as
    deterministic runs need it; they end or are lost at once."""

    poll_s = 0.25

    def __init__(self, pool: AttemptPool, together: bool = False) -> None:
        self._pool = pool
        self._together = together
        self._inbox = Inbox()

    def start(self, attempts: Sequence[Attempt]) -> None:
        """Plays the attempts, those of a group on the same worker where possible."""
        self._inbox.expected.update(attempt.request_id for attempt in attempts)
        for job in [attempts] if self._together else [[attempt] for attempt in attempts]:
            self._pool.play(job, self._inbox)

    def events(self, timeout_s: float = 0.0) -> list[Event]:
        """What has happened since the last call. Raises what ended the pool."""
        self._pool.compare()
        return self._inbox.take(timeout_s)

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Ends attempts; nothing is heard of them any more."""
        names = set(request_ids)
        self._inbox.expected -= names
        self._pool.cancel(self._inbox, names)

    def close(self) -> None:
        """Ends all attempts."""
        self.cancel(list(self._inbox.expected))
