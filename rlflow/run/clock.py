"""How long a run has been going on."""

from __future__ import annotations

import time


class Clock:
    """Starts when it is made. before_s: seconds of earlier sessions of a resumed run."""

    def __init__(self, before_s: float = 0.0) -> None:
        self.before_s = before_s
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds that the run took so far, all sessions together."""
        return self.before_s + time.monotonic() - self._started
