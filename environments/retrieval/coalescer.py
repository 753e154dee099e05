"""Many concurrent searches as few batches."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from rlflow_environments.retrieval.errors import QueueFullError

Hit = TypeVar("Hit")
_AT_A_TURN = 8  # queries of one request that are searched before the next request has its turn
_CONSIDERATE = 8  # batches of one turn each after a small request: its client will ask again
_BATCH_CHARACTERS = 65_536  # of a batch, and one query more: others wait for its end
_HERE_BATCH = 16  # queries that an event loop searches itself before it looks around
_TIMED = 9  # batches whose median time decides: the machine may interrupt one of them
Key = tuple[str, int]
"""(query, top_k): searches of one key have one result."""


class BatchSearch(Protocol[Hit]):
    """What is coalesced: a Retriever, or anything that searches a batch like one."""

    def search(self, queries: Sequence[str], top_k: int) -> Sequence[Sequence[Hit]]: ...


class PendingSearch(Generic[Hit]):
    """One caller's queries. Await `done` for their results, in order; ending it otherwise withdraws
    what is not yet searched.

    waited_s: until the first of them was taken up. searched_s: from then until the last was
    answered. shared: how many of them joined an equal search that was waiting or under way."""

    def __init__(self, size: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[list[list[Hit]]] = self.loop.create_future()
        self.results: list[list[Hit]] = [[]] * size
        self.missing = size
        self.problem: BaseException | None = None
        self.shared = 0
        self.waited_s = 0.0
        self.searched_s = 0.0
        self.started = time.perf_counter()

    def settle(self) -> None:
        """Wakes the caller; runs in its event loop."""
        if self.done.done():  # it went away
            return
        if self.problem is None:
            self.done.set_result(self.results)
        else:
            self.done.set_exception(self.problem)


@dataclass(eq=False)
class _Lookup(Generic[Hit]):
    """One distinct search, and the places in the callers' results that it fills. turn: when it
    is searched, before larger ones; number: in order of arrival, among equal turns; small: of a
    request that needs one turn; client: who asked first, of a request's first turn alone."""

    query: str
    top_k: int
    turn: int
    number: int
    small: bool
    client: str | None
    callers: list[tuple[PendingSearch[Hit], int]] = field(default_factory=list)

    def __lt__(self, other: _Lookup[Hit]) -> bool:
        return (self.turn, self.number) < (other.turn, other.number)

    def begin(self, now: float) -> bool:
        """Whether anybody still waits for it; records for how long."""
        for call, _ in self.callers:
            call.waited_s = call.waited_s or now - call.started
        return any(not call.done.done() for call, _ in self.callers)


class CoalescedSearch(Generic[Hit]):
    """Searches one query at a time for its callers, in batches for the retriever.

    Requests take turns: of one with many queries some are searched, then those of others. Clients
    take turns too: one whose waiting requests fill a batch is put off, whatever their number. While
    there are small requests a batch ends with the turn, so that none of them waits for a batch that
    is full of others' queries. One thread owns the retriever: what arrives while it searches is the
    next batch, so nobody ever waits for a batch to fill. Where a batch takes less than `here_s`,
    the event loop searches it itself: a way through a thread and back takes longer than many a
    search. No request can see another: a batch has one top_k, an equal search that is waiting or
    under way is joined but answered with a list of one's own, and when a batch fails each of its
    searches is tried again alone, so that only the one at fault fails. Callers may live in any
    thread and any event loop."""

    def __init__(
        self,
        retriever: BatchSearch[Hit],
        *,
        max_batch: int = 64,
        max_waiting: int | None = None,
        on_batch: Callable[[int, float], None] | None = None,
        here_s: float = 0.0,
    ) -> None:
        """max_waiting: searches that may wait for the turns up to a request's own (None: any
        number). on_batch: called with the size and seconds of every batch. here_s: for a retriever
        that only computes, and callers in one event loop."""
        self._retriever = retriever
        self._max_batch = max_batch
        self._max_waiting = max_waiting
        self._on_batch = on_batch
        self._here_s = here_s
        self._seconds: deque[float] = deque([1.0] * _TIMED, _TIMED)  # of the latest batches
        self._lookups: dict[Key, _Lookup[Hit]] = {}  # waiting or under way
        self._waiting: dict[int, list[_Lookup[Hit]]] = {}  # heaps by top_k; no empty ones
        self._turn = 0  # of the search that was taken up last
        self._in_turn: Counter[int] = Counter()  # searches that wait, by turn
        self._of_client: Counter[str] = Counter()  # first turns of requests that wait
        self._considerate = 0  # batches to come that end with their turn
        self._waiting_count = 0
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._busy = False
        # The thread starts with the first search and ends when this object is garbage or the
        # interpreter exits.
        self._owner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="search")

    @property
    def waiting(self) -> int:
        """How many searches wait for their batch."""
        return self._waiting_count

    @property
    def seconds_to_empty(self) -> float:
        """For what waits now, in full batches that take as long as the latest."""
        return self._waiting_count / self._max_batch * self._usual_s

    @property
    def _usual_s(self) -> float:
        return sorted(self._seconds)[_TIMED // 2]

    async def search(self, query: str, top_k: int) -> list[Hit]:
        """At most `top_k` hits, best first. What the retriever raises for this query is raised
        here."""
        return (await self.submit([query], top_k).done)[0]

    def submit(self, queries: Sequence[str], top_k: int, client: str = "") -> PendingSearch[Hit]:
        """Puts queries in; call it where an event loop runs. client: who asks, for taking turns.
        Raises QueueFullError, and then none of them is in."""
        call: PendingSearch[Hit] = PendingSearch(len(queries))
        if not queries:
            call.settle()
            return call
        with self._lock:
            first = self._turn + self._of_client[client] // self._max_batch
            self._admit(queries, top_k, first)
            small = len(queries) <= _AT_A_TURN
            for slot, query in enumerate(queries):
                lookup = self._lookups.get((query, top_k))
                if lookup is None:
                    turn = first + slot // _AT_A_TURN
                    of = client if slot < _AT_A_TURN else None
                    lookup = self._lookups[query, top_k] = _Lookup(
                        query, top_k, turn, next(self._numbers), small, of
                    )
                    self._of_client[client] += of is not None
                    heapq.heappush(self._waiting.setdefault(top_k, []), lookup)
                    self._waiting_count += 1
                    self._in_turn[turn] += 1
                else:
                    call.shared += 1
                lookup.callers.append((call, slot))
            wake = self._waiting_count > 0 and not self._busy
            self._busy = self._busy or wake
        if wake:
            self._wake(call.loop)
        return call

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        """Searches what waits: in a thread, or in the loop when all that it has read is in."""
        if self._usual_s < self._here_s:
            loop.call_soon(self._drain_here, loop)
        else:
            self._owner.submit(self._drain, loop)

    def _drain_here(self, loop: asyncio.AbstractEventLoop) -> None:
        if batch := self._take(_HERE_BATCH):
            self._answer(batch)
            self._wake(loop)

    def _admit(self, queries: Sequence[str], top_k: int, first: int) -> None:
        # A request that is larger than the whole queue is served when nothing waits: it could never
        # be served otherwise.
        if self._max_waiting is None or not self._waiting_count:
            return
        new = sum((query, top_k) not in self._lookups for query in queries)
        last = first + (len(queries) - 1) // _AT_A_TURN
        before = sum(count for turn, count in self._in_turn.items() if turn <= last)
        if before + new > self._max_waiting:
            raise QueueFullError(
                f"{before} searches are waiting and {new} more would pass the limit of "
                f"{self._max_waiting}."
            )

    def _drain(self, loop: asyncio.AbstractEventLoop) -> None:
        """Searches batch after batch until nothing waits, or the loop can do it itself."""
        while batch := self._take(self._max_batch):
            self._answer(batch)
            if self._usual_s < self._here_s:
                with contextlib.suppress(RuntimeError):  # the loop was closed: go on here
                    loop.call_soon_threadsafe(self._drain_here, loop)
                    return

    def _take(self, most: int) -> list[_Lookup[Hit]]:
        """The search whose turn it is and following ones with the same top_k, at most `most`,
        without those that nobody waits for any more."""
        batch: list[_Lookup[Hit]] = []
        now = time.perf_counter()
        with self._lock:
            while self._waiting and not batch:  # a queue may hold only searches that nobody wants
                top_k = min(self._waiting, key=lambda top_k: self._waiting[top_k][0])
                queue, characters = self._waiting[top_k], 0
                while queue and len(batch) < min(most, self._max_batch):
                    later = batch and queue[0].turn > batch[-1].turn
                    if characters >= _BATCH_CHARACTERS or (later and self._considerate):
                        break
                    lookup = heapq.heappop(queue)
                    characters += len(lookup.query)
                    self._turn = max(self._turn, lookup.turn)
                    self._waiting_count -= 1
                    self._in_turn[lookup.turn] -= 1
                    if lookup.client is not None:
                        self._of_client[lookup.client] -= 1
                    if lookup.small:
                        self._considerate = _CONSIDERATE
                    if lookup.begin(now):
                        batch.append(lookup)
                    else:
                        del self._lookups[lookup.query, top_k]
                if not queue:
                    del self._waiting[top_k]
            self._busy = bool(batch)
            self._considerate = max(0, self._considerate - 1)
            self._in_turn += Counter()  # without those that are empty
            self._of_client += Counter()
        return batch

    def _answer(self, batch: list[_Lookup[Hit]]) -> None:
        start = time.perf_counter()
        problem: BaseException | None = None
        results: Sequence[Any] = ()
        try:
            results = self._retriever.search([lookup.query for lookup in batch], batch[0].top_k)
            if len(results) != len(batch):
                raise ValueError(
                    f"the retriever answered {len(batch)} queries with {len(results)} results"
                )
        except Exception as failure:  # noqa: BLE001 -- it belongs to the caller of that query
            problem = failure
        if problem is not None and len(batch) > 1:
            for lookup in batch:
                self._answer([lookup])
            return
        seconds = time.perf_counter() - start
        self._seconds.append(seconds)
        if self._on_batch is not None:
            self._on_batch(len(batch), seconds)
        self._deliver(batch, results, problem)

    def _deliver(
        self, batch: list[_Lookup[Hit]], results: Sequence[Any], problem: BaseException | None
    ) -> None:
        """Fills the callers' results and wakes each event loop once."""
        complete: dict[asyncio.AbstractEventLoop, list[PendingSearch[Hit]]] = {}
        with self._lock:  # from here on nobody can join
            for lookup in batch:
                del self._lookups[lookup.query, lookup.top_k]
        now = time.perf_counter()
        for lookup, hits in zip(batch, results if problem is None else itertools.repeat([])):
            for call, slot in lookup.callers:
                call.results[slot] = list(hits)
                call.missing -= 1
                call.problem = call.problem or problem
                if call.missing == 0:
                    call.searched_s = now - call.started - call.waited_s
                    complete.setdefault(call.loop, []).append(call)
        here = asyncio._get_running_loop()
        for loop, calls in complete.items():
            if loop is here:
                _settle(calls)
                continue
            with contextlib.suppress(RuntimeError):  # the loop was closed: its callers went away
                loop.call_soon_threadsafe(_settle, calls)


def _settle(calls: list[PendingSearch[Any]]) -> None:
    for call in calls:
        call.settle()
