"""Attempts in flight: lanes on every engine play one after another, and groups come out as they end."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack
from queue import Empty, SimpleQueue
from typing import Any

from rlflow.errors import RolloutError
from rlflow.rollout.deterministic import Rounds
from rlflow.rollout.engine import Engine
from rlflow.rollout.episodes import Attempt, EpisodePlayer, Generate
from rlflow.rollout.event_loop import LoopThread, LoopWatch, Running
from rlflow.types import Group, Trajectory, stamp

logger = logging.getLogger(__name__)

OnEpisode = Callable[[int, int, Trajectory], object]
"""(how many have ended, of how many, the one that just did)."""


class Submission:
    """Attempts that `Rollout.submit` started; they proceed whether or not anybody reads.

    max_aborted_share: `completed` raises RolloutError at its end where more of the attempts were aborted. None: the caller
    expects any number of them."""

    def __init__(
        self, attempts: Sequence[Attempt], max_aborted_share: float | None, on_episode: OnEpisode | None = None
    ) -> None:
        self.group_ids = list(dict.fromkeys(attempt.group_id for attempt in attempts))
        self._attempts = attempts
        self._max_aborted_share = max_aborted_share
        self._on_episode = on_episode
        self._ended = 0
        self._sizes = Counter(attempt.group_id for attempt in attempts)
        self._open: dict[str, dict[int, Trajectory]] = {}  # by group and number: what has ended of groups that have not
        self._groups: SimpleQueue[Group | None] = SimpleQueue()  # None: there are no more
        self._aborted: dict[int, str] = {}
        self._running: Running[None]
        self._watch: LoopWatch

    def start(
        self,
        thread: LoopThread,
        engines: Sequence[Engine],
        player: EpisodePlayer,
        *,
        priority: int = 0,
        turn: asyncio.Lock | None = None,
    ) -> None:
        """Plays the attempts in the loop's thread. turn: deterministic collections wait for it, one at a time."""
        self._watch = thread.watch(player.call_s)
        self._running = thread.start(self._play(engines, player, priority, turn))
        self._running.on_end(lambda: self._groups.put(None))

    def completed(self) -> Iterator[Group]:
        """The groups, each as soon as its last attempt ended, whatever other attempts are doing.

        Leaving the iterator early ends what is in flight. Raises what was wrong with the set-up, and RolloutError where
        too many attempts were aborted; it names the first error."""
        try:
            while (group := self._next()) is not None:
                yield group
            self._groups.put(None)  # for a second reader
            self.result()
        finally:
            self.cancel()
        self._check_aborted()

    def result(self) -> None:
        """Waits for the end of all attempts; raises what was wrong with the set-up."""
        self._running.result()

    def on_end(self, function: Callable[[], None]) -> None:
        """Calls the function when nothing is in flight any more, in the thread that plays."""
        self._running.on_end(function)

    def _next(self) -> Group | None:
        while True:
            try:
                return self._groups.get(timeout=self._watch.poll_s)
            except Empty:
                self._watch.check()

    @property
    def ended(self) -> bool:
        """Whether nothing is in flight any more."""
        return self._running.ended

    def cancel(self) -> None:
        """Ends the attempts in flight and waits for their clean-up; of no effect where they have ended."""
        self._running.cancel()

    async def _play(
        self, engines: Sequence[Engine], player: EpisodePlayer, priority: int, turn: asyncio.Lock | None
    ) -> None:
        async with AsyncExitStack() as stack:
            if turn is not None:
                await stack.enter_async_context(turn)
            lanes = []
            for engine, indices in zip(engines, self._shares(len(engines))):
                count = min(len(indices), engine.max_concurrency)
                rounds = None if turn is None else Rounds(engine, count)
                generate = functools.partial((rounds or engine).generate, priority=priority)
                queue = iter(indices)
                lanes += [self._lane(queue, engine, player, generate, rounds) for _ in range(count)]
            await _all(lanes)

    async def _lane(
        self, queue: Iterator[int], engine: Engine, player: EpisodePlayer, generate: Generate, rounds: Rounds | None
    ) -> None:
        for index in queue:
            attempt = self._attempts[index]
            try:
                trajectory = await player.play(attempt, generate)
            finally:
                engine.release(attempt.request_id)
            self._end(index, trajectory)
        if rounds is not None:
            rounds.leave()

    def _shares(self, engines: int) -> list[list[int]]:
        """Which attempts each engine plays. Attempts at one task share their prompt's cache, so they stay together where
        there are groups for every engine."""
        whole_groups = len(self.group_ids) >= engines
        places = {group_id: place for place, group_id in enumerate(self.group_ids)}
        shares: list[list[int]] = [[] for _ in range(engines)]
        for index, attempt in enumerate(self._attempts):
            shares[(places[attempt.group_id] if whole_groups else index) % engines].append(index)
        return shares

    def _end(self, index: int, trajectory: Trajectory) -> None:
        attempt = self._attempts[index]
        if not trajectory.usable:
            self._aborted[index] = f"task '{trajectory.task_id}': {trajectory.error}"
        self._ended += 1
        if self._on_episode is not None:
            self._on_episode(self._ended, len(self._attempts), trajectory)
        ended = self._open.setdefault(attempt.group_id, {})
        ended[attempt.number] = trajectory
        if len(ended) == self._sizes[attempt.group_id]:
            del self._open[attempt.group_id]
            whole = [ended[number] for number in sorted(ended)]
            stamp(whole)
            self._groups.put(Group(attempt.group_id, attempt.task, whole))

    def _check_aborted(self) -> None:
        count, total, share = len(self._aborted), len(self._attempts), self._max_aborted_share
        if not count or share is None:
            return
        first = self._aborted[min(self._aborted)]
        logger.warning("%d of %d episodes aborted; first: %s", count, total, first)
        if count > share * total:
            raise RolloutError(
                f"rollout: {count} of {total} episodes were aborted, more than max_aborted_share={share}; first: {first}"
            )


async def _all(coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Runs them together; the first failure cancels the others and is raised when they have ended."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
