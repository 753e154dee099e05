"""What a pool of rollout workers knows of each: its place, what it plays, when it is given up; and who gets the next attempts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlflow.errors import RLFlowError
from rlflow.rollout.episodes import Attempt
from rlflow.rollout.players import Event, Inbox
from rlflow.rollout.workers import Loaded, WorkerFacts, WorkerNews


class Handle(Protocol):
    """A worker in another process. `call` does not wait; the future raises an RLFlowError in one line."""

    def call(self, method: str, *arguments: Any) -> Future[Any]: ...

    def kill(self) -> None: ...


@dataclass(frozen=True)
class PoolLimits:
    """By when something is given up, seconds. answer_s: a worker that is looked at; place_s: one that was asked for and has no
    process yet; start_s: making engine and environment, taking over weights, and for all being down; attempt_s: an attempt.
    failures: in a row, without an attempt that ended, after which a worker is not started again. back_off_s: before the first
    restart, doubled with each failure."""

    answer_s: float = 30.0
    place_s: float = 120.0
    start_s: float = 600.0
    attempt_s: float = 7800.0
    failures: int = 5
    back_off_s: float = 1.0


@dataclass(eq=False)
class EpisodeJob:
    """Attempts that a worker plays, or will, together. inbox: of who started them. left: those that are not over. ended: what
    is told of the others once all are."""

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
    """A worker's place: the processes in it come and go. state: down, starting, up, quarantined."""

    name: str
    state: str = "down"
    handle: Handle | None = None
    facts: WorkerFacts | None = None
    calls: dict[str, Future[Any]] = field(default_factory=dict)  # look, build, load: under way
    plays: list[Future[Any]] = field(default_factory=list)
    jobs: dict[str, EpisodeJob] = field(default_factory=dict)  # by request id
    silent_s: float = 0.0  # since it answered last
    placed: bool = False  # it has answered
    since: float = 0.0  # when it was started
    loading_since: float = 0.0
    retry_at: float = 0.0
    failures: int = 0
    failed_loads: int = 0
    ended: int = 0  # attempts, since the last report
    reads: list[Loaded] = field(default_factory=list)  # since the last report
    loaded: Loaded | None = None  # weights that the trainer has not yet compared
    passed: int = -1  # the version that was verified last
    held: list[WorkerNews] = field(default_factory=list)  # until what it samples from is verified

    @property
    def version(self) -> int:
        """Of the weights that it took over last, compared or not."""
        return self.passed if self.loaded is None else self.loaded.version

    @property
    def proven(self) -> bool:
        """Whether what it plays is known to come from the weights that it says."""
        return self.facts is None or self.facts.hashes_weights or ("load" not in self.calls and self.loaded is None)


class WorkerGone(RLFlowError):
    """The process of a rollout worker is gone."""


def chosen(ready: Sequence[WorkerSlot], job: EpisodeJob) -> WorkerSlot | None:
    """The worker for a job: one that plays attempts of its group, which share a prompt; else the one with the most room."""
    room = {slot: _room(slot) for slot in ready}
    free = [slot for slot in ready if room[slot] > 0]
    if not free:
        return None
    alike = Counter({slot: sum(other.group == job.group for other in slot.jobs.values()) for slot in free})
    return max(free, key=lambda slot: (alike[slot], room[slot]))


def _room(slot: WorkerSlot) -> int:
    assert slot.facts is not None
    return slot.facts.max_concurrency - len(slot.jobs)


def weight_reads(slots: Sequence[WorkerSlot]) -> dict[str, float]:
    """`workers/` metrics of the weights that were read since the last call; {} where none were."""
    reads = [read for slot in slots for read in slot.reads]
    for slot in slots:
        slot.reads.clear()
    if not reads:
        return {}
    size = sum(read.bytes for read in reads)
    return {"workers/weights_mib": size / 2**20, "workers/weights_delta": sum(read.delta for read in reads) / len(reads)}
