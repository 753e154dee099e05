"""Work on long texts beside an event loop that must not wait for it, and places for work."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TypeVar

LONG_TEXT = 50_000  # characters: as long to normalize as a change of threads may take

T = TypeVar("T")


async def beside_the_loop(characters: int, work: Callable[[], T]) -> T:
    """What `work`, on so many characters, returns: in a thread where they are many."""
    return await asyncio.to_thread(work) if characters > LONG_TEXT else work()


class EpisodePlaces:
    """How many pieces of work run at the same time; none: two per processor."""

    def __init__(self, at_once: int | None = None) -> None:
        self._at_once = at_once or 2 * len(os.sched_getaffinity(0))
        self._places: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    def here(self) -> asyncio.Semaphore:
        """Those of this loop, as checks have another one."""
        loop = asyncio.get_running_loop()
        if self._places is None or self._places[0] is not loop:
            self._places = (loop, asyncio.Semaphore(self._at_once))
        return self._places[1]
