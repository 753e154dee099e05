"""Seconds and peak memory per phase of a training step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlflow.report.memory import PeakMemory


class PhaseTimer:
    """Seconds and peak memory per phase of a step. Phases may be entered many times; they must not nest. `on_enter` is told
    each phase's name as it begins, for a display; `spans` are the last phases as (name, begin, end), seconds since 1970."""

    def __init__(self, on_enter: Callable[[str], object] | None = None) -> None:
        self.on_enter = on_enter
        self.seconds: dict[str, float] = {}
        self.memory = PeakMemory()
        self.spans: deque[tuple[str, float, float]] = deque(maxlen=10_000)
        self.current = ""  # the phase that is on, for a watchdog
        self.started = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the seconds spent inside to the phase, also when it raises."""
        start, self.current = time.perf_counter(), name
        if self.on_enter is not None:
            self.on_enter(name)
        try:
            with self.memory.measure(name):
                yield
        finally:
            self.current = ""
            seconds, now = time.perf_counter() - start, time.time()
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            self.spans.append((name, now - seconds, now))

    def take_phase(self, name: str) -> dict[str, float]:
        """`time/<phase>_s` and `memory/<phase>_gib` of one phase, which no longer counts in what `take` gives next."""
        seconds = self.seconds.pop(name)
        self.started += seconds
        return {f"time/{name}_s": seconds, f"memory/{name}_gib": self.memory.take_one(name)}

    def take(self) -> dict[str, float]:
        """`time/<phase>_s` and `memory/<phase>_gib` of every phase entered and `time/step_s` since the last call; starts anew."""
        now = time.perf_counter()
        taken = {f"time/{name}_s": seconds for name, seconds in self.seconds.items()}
        taken["time/step_s"] = now - self.started
        taken |= {f"memory/{name}_gib": peak for name, peak in self.memory.take().items()}
        self.seconds, self.started = {}, now
        return taken
