"""The progress of long work, shown on the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

StageProgress = Callable[[str, int, int], None]
"""Called with (stage, done, total) while it works."""


class ProgressLine:
    """Shows a stage, how far it is and when it will be done: in place on a terminal, else a line
    every ten seconds."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._interval_s = 0.2 if stream.isatty() else 10.0
        self._stage = ""
        self._began = self._shown = 0.0
        self._first = 0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self._end_line()
            self._stage, self._began, self._first, self._shown = stage, now, done, 0.0
        if now - self._shown < self._interval_s and done < total:
            return
        self._shown = now
        end = "\r" if self._stream.isatty() else "\n"
        self._stream.write(f"{stage}{self._share(now, done, total)}{' ' * 8}{end}")
        self._stream.flush()

    def _share(self, now: float, done: int, total: int) -> str:
        if total <= 1:
            return ""
        rate = (done - self._first) / max(now - self._began, 1e-9)
        left = (
            f", {_clock((total - done) / rate)} left, {rate:,.0f}/s"
            if rate and done < total
            else ""
        )
        return f": {done:,} of {total:,} ({done / total:.1%}){left}"

    def _end_line(self) -> None:
        if self._stage and self._stream.isatty():
            self._stream.write("\n")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
