"""How much memory a stretch of work took at its highest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

GIB = 2**30
SAMPLE_PERIOD_S = 0.02
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): resets VmHWM, the peak resident set size


class PeakMemory:
    """Peaks of this process by name, in GiB: of what torch allocated on the current GPU where it uses one, else of the
    resident set size. The latter is the kernel's own count on Linux, elsewhere the largest of samples."""

    def __init__(self) -> None:
        self._peaks: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Records the peak of the block, also when it raises. Blocks must not nest: each starts the count anew."""
        peak_bytes = _start()
        try:
            yield
        finally:
            self._peaks[name] = max(self._peaks.get(name, 0.0), peak_bytes() / GIB)

    def take_one(self, name: str) -> float:
        """The highest peak of one name since the last call, in GiB; starts it anew."""
        return self._peaks.pop(name)

    def take(self) -> dict[str, float]:
        """The highest peak of each name since the last call, in GiB; starts anew."""
        taken, self._peaks = self._peaks, {}
        return taken


def highest(peaks: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Per name the highest of the processes' peaks."""
    result: dict[str, float] = {}
    for peak in peaks:
        for name, value in peak.items():
            result[name] = max(result.get(name, 0.0), value)
    return result


def _start() -> Callable[[], int]:
    """Starts a count; calling the answer ends it and gives the peak in bytes."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:  # another system, or a sandbox without it
        return _sampled()
    return _kernel_peak


def _kernel_peak() -> int:
    lines = _STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def _sampled() -> Callable[[], int]:
    """Samples the resident set size in a thread until the answer is called."""
    import psutil

    process = psutil.Process()
    highest = [process.memory_info().rss]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(SAMPLE_PERIOD_S):
            highest[0] = max(highest[0], process.memory_info().rss)

    thread = threading.Thread(target=watch, name="peak-memory", daemon=True)
    thread.start()

    def stop() -> int:
        done.set()
        thread.join()
        return max(highest[0], process.memory_info().rss)

    return stop
