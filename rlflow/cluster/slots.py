"""A pool's knowledge of each rollout worker, and the choice of who gets the next attempts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlflow.rollout.episodes import Attempt
from rlflow.rollout.players import Begun, Ended, Event, Inbox, Lost
from rlflow.rollout.workers import Loaded, WorkerFacts, WorkerNews
from rlflow.types import Trajectory


class Handle(Protocol):
    """A worker in another process. `call` does not wait; the future raises an RLFlowError in one
    line, ActorDied where the process has."""

    def call(self, method: str, *arguments: Any) -> Future[Any]: ...

    def kill(self) -> None: ...


@dataclass(frozen=True)
class PoolLimits:
    """By when something is given up, seconds. answer_s: a worker that is looked at; place_s: one
    that was asked for and has no process yet; start_s: making engine and environment, taking over
    weights, and for all being down; attempt_s: an attempt. failures: in a row, without an attempt
    that ended, after which a worker is not started again. back_off_s: before the first restart,
    doubled with each failure."""

    answer_s: float = 30.0
    place_s: float = 120.0
    start_s: float = 600.0
    attempt_s: float = 7800.0
    failures: int = 5
    back_off_s: float = 1.0


@dataclass(eq=False)
class EpisodeJob:
    """Attempts that a worker plays, or will, together. inbox: of who started them. left: those that
    are not over. ended: what is told of the others once all are."""

    attempts: Sequence[Attempt]
    inbox: Inbox
    left: set[str] = field(default_factory=set)
    ended: list[Event] = field(default_factory=list)
    until: float = 0.0

    @property
    def group(self) -> str:
        """Of its attempts; of the first one, where there are several."""
        return self.attempts[0].group_id

    @property
    def first(self) -> bool:
        """Whether it goes before what runs ahead of training."""
        return self.attempts[0].priority is not None


@dataclass(eq=False)
class WorkerSlot:
    """A worker's place: the processes in it come and go."""

    name: str
    handle: Handle | None = None
    facts: WorkerFacts | None = None  # once engine and environment are there
    placed: bool = False  # it has answered
    failures: int = 0
    broken: asyncio.Future[None] | None = None  # fails with what is wrong with the process
    outdated: asyncio.Event = field(default_factory=asyncio.Event)  # there are newer weights
    loading: bool = False
    loaded: Loaded | None = None  # weights that the trainer has not yet compared
    passed: int = -1  # the version that was verified last
    held: list[WorkerNews] = field(default_factory=list)  # until what it samples from is verified
    jobs: dict[str, EpisodeJob] = field(default_factory=dict)  # by request id
    ended: int = 0  # attempts, since the last report
    reads: list[Loaded] = field(default_factory=list)  # since the last report

    @property
    def version(self) -> int:
        """Of the weights that it took over last, compared or not."""
        return self.passed if self.loaded is None else self.loaded.version

    @property
    def proven(self) -> bool:
        """Whether what it plays is known to come from the weights that it says."""
        hashes = self.facts is None or self.facts.hashes_weights
        return hashes or not (self.loading or self.loaded)

    @property
    def room(self) -> int:
        """Attempts that it may get."""
        return 0 if self.facts is None else self.facts.max_concurrency - len(self.jobs)

    def call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        """The answer of its process."""
        assert self.handle is not None
        return asyncio.wrap_future(self.handle.call(method, *arguments))

    def play(self, jobs: Sequence[Sequence[Attempt]]) -> None:
        """Gives it attempts, those of a job together."""
        broken = self.broken

        def look(call: asyncio.Future[None]) -> None:
            error = None if call.cancelled() else call.exception()
            if error is not None and broken is self.broken:  # else another process is there by now
                self.fail(error)

        self.call("play", jobs).add_done_callback(look)

    def hear(self, news: WorkerNews, read: Callable[[Any], Trajectory]) -> None:
        """Passes on what has happened. read: a trajectory of its bytes."""
        for begun in news.begun:
            job = self.jobs.get(begun.request_id)
            if job is not None:
                job.inbox.put([Begun(begun.request_id, begun.version, self.name)])
        for played in news.ended:
            job = self.jobs.pop(played.request_id, None)
            if job is None:
                continue  # cancelled in the meantime
            self.failures, self.ended = 0, self.ended + 1
            job.left.discard(played.request_id)
            job.ended.append(Ended(played.request_id, read(played.payload)))
            if not job.left:
                job.inbox.put(job.ended)

    def lose(self, reason: str) -> int:
        """Tells that what the worker plays is lost; returns how many attempts."""
        jobs, self.jobs = list(dict.fromkeys(self.jobs.values())), {}
        for job in jobs:
            job.inbox.put([Lost(attempt.request_id, self.name, reason) for attempt in job.attempts])
        return sum(len(job.attempts) for job in jobs)

    def fail(self, error: BaseException) -> None:
        """The process is of no use any more."""
        if self.broken is not None and not self.broken.done():
            self.broken.set_exception(error)


def chosen(ready: Sequence[WorkerSlot], job: EpisodeJob) -> WorkerSlot | None:
    """The worker for a job: one that plays attempts of its group, which share a prompt; else the
    one with the most room."""
    free = [slot for slot in ready if slot.room > 0]
    if not free:
        return None
    alike = {slot: sum(o.group == job.group for o in slot.jobs.values()) for slot in free}
    return max(free, key=lambda slot: (alike[slot], slot.room))


def weight_reads(slots: Sequence[WorkerSlot]) -> dict[str, float]:
    """`sync/` metrics of the weights that were read since the last call; {} where none were."""
    reads = [read for slot in slots for read in slot.reads]
    for slot in slots:
        slot.reads.clear()
    if not reads:
        return {}
    return {
        "sync/mib": sum(read.bytes for read in reads) / 2**20,
        "sync/delta_share": sum(read.delta for read in reads) / len(reads),
        "time/sync_read_s": max(read.read_s for read in reads),
        "time/sync_load_s": max(read.load_s for read in reads),
    }
