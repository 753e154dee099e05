"""Work on long texts beside an event loop that must not wait for it, and places for work."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

LONG_TEXT = 50_000  # characters: as long to normalize as a change of threads may take

T = TypeVar("T")


async def beside_the_loop(characters: int, work: Callable[[], T]) -> T:
    """What `work`, on so many characters, returns: in a thread where they are many."""
    if characters <= LONG_TEXT:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_threads(os.getpid()), work)


@functools.cache
def _threads(process: int) -> ThreadPoolExecutor:
    """The threads of this process, as a fork has none. They are not asyncio's, where agents may
    wait, and few, as they all compete with the loop."""
    return ThreadPoolExecutor(thread_name_prefix="long-texts")


class EpisodePlaces:
    """How many pieces of work run at the same time; none: two per processor."""

    def __init__(self, at_once: int | None = None) -> None:
        self._at_once = at_once or 2 * len(os.sched_getaffinity(0))
        self._places: WeakKeyDictionary[Any, asyncio.Semaphore] = WeakKeyDictionary()

    def here(self) -> asyncio.Semaphore:
        """Those of this loop, as checks have another one."""
        places = asyncio.Semaphore(self._at_once)
        return self._places.setdefault(asyncio.get_running_loop(), places)
