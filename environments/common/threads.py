"""Work on text of any length beside an event loop that must not wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

LONG_TEXT = 50_000  # characters: as long to normalize as a change of threads may take

T = TypeVar("T")


async def beside_the_loop(characters: int, work: Callable[[], T]) -> T:
    """What `work`, on so many characters, returns: in a thread where they are many."""
    return await asyncio.to_thread(work) if characters > LONG_TEXT else work()
