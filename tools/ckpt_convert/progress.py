"""Progress of a conversion on stderr, and what it took."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def timed(convert: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What a conversion of these arguments, shown by a meter, says of itself, with `seconds` and
    `peak_rss_mib`."""
    start = time.monotonic()
    report = convert(*arguments, Meter(sys.stderr.isatty()))
    seconds = round(time.monotonic() - start, 3)
    return {**report, "seconds": seconds, "peak_rss_mib": peak_rss_mib()}


def peak_rss_mib() -> int:
    """The most resident memory that this process had, MiB."""
    words = Path("/proc/self/status").read_text().split()
    return int(words[words.index("VmHWM:") + 1]) // 1024


class Meter:
    """Share done, GB/s, and seconds left: one line on a terminal, else a line every half minute."""

    def __init__(self, terminal: bool) -> None:
        self._terminal = terminal
        self._done = 0
        self._start = self._shown = time.monotonic()

    def __call__(self, count: int, total: int) -> None:
        """count: bytes since the last call."""
        self._done += count
        now = time.monotonic()
        finished = self._done >= total
        pause = 0.2 if self._terminal else 30  # seconds
        if now - self._shown < pause and not (finished and self._terminal):
            return
        self._shown = now
        rate = self._done / max(now - self._start, 1e-6)
        left = (total - self._done) / max(rate, 1.0)
        share = 100 * self._done / max(total, 1)
        text = f"{share:3.0f}%  {self._done / 1e9:.2f} GB  {rate / 1e9:.2f} GB/s  {left:.0f} s left"
        if self._terminal:
            text = f"\r{text} "
        end = "" if self._terminal and not finished else "\n"
        print(text, end=end, file=sys.stderr, flush=True)
