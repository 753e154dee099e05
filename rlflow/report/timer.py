"""Seconds and peak memory per phase of a training step, and the clock of a run."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

GIB = 2**30
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc(5): resets VmHWM, the peak resident set size


class Clock:
    """Starts when it is made. before_s: seconds of earlier sessions of a resumed run."""

    def __init__(self, before_s: float = 0.0) -> None:
        self.before_s = before_s
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds of the run so far, all sessions together."""
        return self.before_s + time.monotonic() - self._started


class PeakMemory:
    """Peaks of this process by name, in GiB.

    Of what torch allocated on the current GPU where it uses one, else of the resident set size. A
    system that cannot start that count anew gives the highest since the process began."""

    def __init__(self) -> None:
        self._peaks: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Records the peak of the block, also when it raises. Blocks must not nest."""
        peak_bytes = _start()
        try:
            yield
        finally:
            self._peaks[name] = max(self._peaks.get(name, 0.0), peak_bytes() / GIB)

    def take(self, *names: str) -> dict[str, float]:
        """The highest peak of each name, or of these, since the last call, in GiB; starts anew."""
        return {name: self._peaks.pop(name) for name in names or list(self._peaks)}


def highest(peaks: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Per name the highest of the processes' peaks."""
    found = list(peaks)
    return {name: max(peak.get(name, 0.0) for peak in found) for name in set().union(*found)}


def _start() -> Callable[[], int]:
    """Starts a count; the answer gives its peak in bytes."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated
    with suppress(OSError):  # another system, or a container without it
        CLEAR_REFS.write_text(RESET_PEAK)
    return _resident_peak


def _resident_peak() -> int:
    with suppress(OSError):
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class PhaseTimer:
    """Seconds and peak memory per phase of a step. Phases may recur; they must not nest.

    `on_enter` is told each phase's name as it begins, for a display; `current` is
    the phase that is on, for a watchdog."""

    def __init__(self, on_enter: Callable[[str], object] | None = None) -> None:
        self.on_enter = on_enter
        self.seconds: dict[str, float] = {}
        self.memory = PeakMemory()
        self.current = ""
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
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def take_phase(self, name: str) -> dict[str, float]:
        """`time/<phase>_s` and `memory/<phase>_gib` of one phase, which `take` then leaves out."""
        seconds = self.seconds.pop(name)
        self.started += seconds
        return {
            f"time/{name}_s": seconds,
            f"memory/{name}_gib": self.memory.take(name)[name],
        }

    def take(self) -> dict[str, float]:
        """The same of every phase since the last call, and `time/step_s`; starts anew."""
        now = time.perf_counter()
        taken = {f"time/{name}_s": seconds for name, seconds in self.seconds.items()}
        taken["time/step_s"] = now - self.started
        taken |= {f"memory/{name}_gib": peak for name, peak in self.memory.take().items()}
        self.seconds, self.started = {}, now
        return taken
