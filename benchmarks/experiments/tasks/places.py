"""Slow tools in eight places, such as desktops, which are given to an episode or to all attempts at a task."""

from __future__ import annotations

import asyncio
from typing import Any

from asynchronous import SlowTools

from rlflow.types import Episode, Task

PLACES = 8
BY_EPISODE, BY_TASK = f"{__name__}:ByEpisode", f"{__name__}:ByTask"


class ByEpisode(SlowTools):
    """An episode waits for a place and gives it back at its end."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._free = asyncio.Semaphore(PLACES)

    async def reset(self, task: Task) -> Episode:
        await self._free.acquire()
        return await super().reset(task)

    async def close(self, episode: Episode) -> None:
        self._free.release()


class ByTask(SlowTools):
    """A task has all places until the last of its attempts, as many as there are places, has ended."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._turn = asyncio.Condition()
        self._task: str | None = None
        self._begun = self._ended = 0

    async def reset(self, task: Task) -> Episode:
        async with self._turn:
            await self._turn.wait_for(
                lambda: self._task is None or (self._task == task.id and self._begun < PLACES)
            )
            self._task = task.id
            self._begun += 1
        return await super().reset(task)

    async def close(self, episode: Episode) -> None:
        async with self._turn:
            self._ended += 1
            if self._ended == PLACES:
                self._task, self._begun, self._ended = None, 0, 0
            self._turn.notify_all()
