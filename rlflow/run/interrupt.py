"""Ctrl-C and SIGTERM: at once while a run is being built, as a question that the loop asks between steps afterwards."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

logger = logging.getLogger(__name__)


class Stopped(KeyboardInterrupt):
    """A signal that ends the program at once; what is open is closed on the way."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class Interrupt:
    """While active, SIGINT and SIGTERM raise Stopped; once `graceful` is set, the first one only sets `requested`.

    Outside the main thread (a notebook's worker, for one) signals stay as they are and `requested` stays None.
    """

    def __init__(self) -> None:
        self.requested: str | None = None  # the signal's name
        self.graceful = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested or not self.graceful:
            raise Stopped(number)
        self.requested = signal.Signals(number).name
        logger.warning("%s: finishing this step, then saving; once more stops at once", self.requested)
