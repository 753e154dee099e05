"""How long a run has been going on, and will take."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Mapping

_SMOOTHED = 8  # steps that the remaining time is estimated from


class Clock:
    """Starts when it is made. before_s: seconds of earlier sessions of a resumed run."""

    def __init__(self, before_s: float = 0.0) -> None:
        self.before_s = before_s
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds that the run took so far, all sessions together."""
        return self.before_s + time.monotonic() - self._started


class Pace:
    """Elapsed time of the run's clock, remaining time from the last few steps."""

    def __init__(self, steps: int, first_step: int = 0, clock: Clock | None = None) -> None:
        self.steps = steps
        self.done = first_step
        self.clock = clock or Clock()
        self.durations: collections.deque[float] = collections.deque(maxlen=_SMOOTHED)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Notes a step that ended."""
        self.done = step
        if math.isfinite(metrics.get("time/step_s", math.nan)):
            self.durations.append(metrics["time/step_s"])

    @property
    def elapsed_s(self) -> float:
        """Seconds that the run took so far, all its sessions."""
        return self.clock.seconds

    @property
    def remaining_s(self) -> float | None:
        """Seconds to the last step at the pace of the last few; None before the first step."""
        if not self.durations:
            return None
        return (self.steps - self.done) * sum(self.durations) / len(self.durations)
