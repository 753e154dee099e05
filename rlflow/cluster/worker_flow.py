"""How callers of a pool of rollout workers give attempts and hear of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from queue import Empty, SimpleQueue
from typing import Protocol

from rlflow.cluster.slots import EpisodeJob
from rlflow.rollout.episodes import Attempt
from rlflow.rollout.flow import News
from rlflow.rollout.workers import PlayOrder


class JobPool(Protocol):
    """What plays jobs; see `rlflow.cluster.pool.WorkerPool`."""

    def submit(self, job: EpisodeJob) -> None: ...

    def cancel(self, flow: WorkerFlow, names: set[str] | None) -> None: ...

    def compare(self) -> None: ...


class WorkerFlow:
    """Plays attempts on the workers of a pool; see `rlflow.rollout.flow.Flow`. What it tells may be `Lost`."""

    poll_s = 0.25

    def __init__(self, pool: JobPool, temperature: float | None = None, priority: int | None = None) -> None:
        self._pool = pool
        self._options = temperature, priority
        self._news: SimpleQueue[News] = SimpleQueue()

    def start(self, attempt: Attempt, lane: int) -> None:
        """Plays the attempt, where possible on the worker that has others of the lane."""
        self._pool.submit(EpisodeJob(self, PlayOrder((attempt,), *self._options), lane))

    def start_together(self, attempts: Sequence[Attempt]) -> None:
        """Plays the attempts on one worker, so that equal seeds and weights give equal bits; all end at once, or are lost."""
        self._pool.submit(EpisodeJob(self, PlayOrder(tuple(attempts), *self._options, together=True), 0))

    def tell(self, news: Iterable[News]) -> None:
        """Called by the pool, in its thread."""
        for item in news:
            self._news.put(item)

    def news(self, timeout_s: float = 0.0) -> list[News]:
        """What has happened since the last call, waited for at most that long. Raises what ends the pool."""
        found: list[News] = []
        self._pool.compare()
        try:
            found.append(self._news.get(timeout=timeout_s) if timeout_s > 0 else self._news.get_nowait())
            while True:
                found.append(self._news.get_nowait())
        except Empty:
            return found

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Ends attempts; nothing is heard of them any more."""
        self._pool.cancel(self, set(request_ids))
        names = set(request_ids)
        kept = [item for item in self.news() if item.request_id not in names]
        self.tell(kept)

    def close(self) -> None:
        """Ends all attempts."""
        self._pool.cancel(self, None)
