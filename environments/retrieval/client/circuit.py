"""A circuit breaker: while no server answers, one search at a time asks, and the others wait for
what it finds out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator

from rlflow.http import backoff_s

logger = logging.getLogger("rlflow.search.client")  # under `rlflow`, so that a run's log has it

OPENS_AFTER = 3  # failures in a row, of all searches together
FIRST_REST_S, LONGEST_REST_S = 0.2, 2.0


class Circuit:
    """Closed while a server answers. Used in one event loop.

    Open, it says so in one line of the log instead of one per search, and spares a server that is
    starting again the rush of all searches at once. Nobody waits in it longer than the search's own
    deadline."""

    def __init__(self, where: str) -> None:
        """where: the servers, for messages."""
        self._where = where
        self._failures = 0
        self._opened: float | None = None
        self._asks_next = 0.0
        self._asking = False
        self._changed = asyncio.Event()
        self.last = ""

    async def wait(self) -> bool:
        """Returns when this search may ask; whether it does so for all."""
        while self._opened is not None:
            rest_s = self._asks_next - time.monotonic()
            if not self._asking and rest_s <= 0:
                self._asking = True
                return True
            changed = self._changed
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), None if self._asking else rest_s)
        return False

    @contextlib.contextmanager
    def asking(self, for_all: bool) -> Iterator[None]:
        """While a search asks. for_all: what `wait` said."""
        try:
            yield
        finally:
            if for_all:
                self._asking = False
                self._wake()

    def succeeded(self) -> None:
        """A server answered."""
        if self._opened is not None:
            logger.info(
                "a retrieval server answers again after %.1f s (%s)",
                time.monotonic() - self._opened,
                self._where,
            )
        self._failures, self._opened = 0, None
        self._wake()

    def failed(self, reason: str) -> None:
        """A server failed, and no other one is known to answer."""
        self._failures += 1
        self.last = reason
        now = time.monotonic()
        if self._opened is None and self._failures >= OPENS_AFTER:
            self._opened = now
            logger.warning(
                "no retrieval server answers (%s; last: %s): searches wait up to their deadline, "
                "one at a time asks again",
                self._where,
                reason,
            )
        self._asks_next = now + backoff_s(
            FIRST_REST_S, LONGEST_REST_S, max(1, self._failures - OPENS_AFTER + 1)
        )

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
