"""Says what a trainer hangs in, in the process of the run: nobody else would. (Ranks are watched by `rlflow.cluster.trainer`.)"""

from __future__ import annotations

import logging
import os
import threading
import time

from rlflow.cluster.watching import StallLimits, Stillness, Work, native_stack
from rlflow.report.timer import PhaseTimer

logger = logging.getLogger(__name__)

OTHERS = ("", "rollout", "evaluate")
"""Phases in which the run waits for episodes, which have deadlines of their own."""
LOOK_EVERY_S = 5.0


class Watchdog:
    """A thread that looks at the thread which makes it, within a `with` block: where that one has not moved in a phase of the
    trainer for too long (`StallLimits`), the log says so once, with phase and stack. A run that hangs is not ended: nothing
    could tell whether the call, which is in this very process, would still return."""

    def __init__(self, timer: PhaseTimer, floor_s: float, look_every_s: float = LOOK_EVERY_S) -> None:
        self._timer = timer
        self._deadlines = StallLimits(floor_s)
        self._look_every_s = min(look_every_s, floor_s / 4)
        self._work = Work()
        self._work.begin("run")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rlflow-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        phase, since, told = "", 0.0, False
        stillness = Stillness(0.0)
        while not self._ended.wait(self._look_every_s):
            now = self._timer.current
            if now != phase:
                if phase not in OTHERS:
                    self._deadlines.took(phase, time.monotonic() - since)
                phase, since, told = now, time.monotonic(), False
                stillness = Stillness(self._deadlines.of(phase))
            if phase in OTHERS or told:
                continue
            doing = self._work.look()
            if stillness.look({0: doing}):
                told = True
                told_of = "%s: the trainer has not moved for %g s (cluster.stall_timeout_s, or 3x its longest): %s\n%s"
                stack = native_stack(os.getpid()) or doing.stack()
                logger.error(told_of, phase, stillness.limit_s, doing.place, stack)
