"""What an environment's searches came to between two reports: rates over searches, and the time they took."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class SearchAccount:
    """Counts of searches, thread-safe, and the wall-clock time in which at least one was under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = 0
        self._busy_since = 0.0
        self._reset()

    def _reset(self) -> None:
        self._busy_s = self._waited_s = 0.0
        self._searches = self._empty = self._repeated = self._gold = 0

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Measures a search, or a page access, that somebody waits for."""
        started = time.perf_counter()
        with self._lock:
            if self._under_way == 0:
                self._busy_since = started
            self._under_way += 1
        try:
            yield
        finally:
            ended = time.perf_counter()
            with self._lock:
                self._under_way -= 1
                self._waited_s += ended - started
                if self._under_way == 0:
                    self._busy_s += ended - self._busy_since

    def book(self, *, empty: bool, repeated: bool, gold: bool) -> None:
        """Counts an answered search. empty: it found nothing; repeated: its episode had asked the same before; gold: a passage
        that it found holds a gold answer."""
        with self._lock:
            self._searches += 1
            self._empty += empty
            self._repeated += repeated
            self._gold += gold

    def take(self) -> dict[str, float]:
        """The metrics since the last call, `section/name`; starts anew. Rates are missing where there was no search."""
        with self._lock:
            busy = self._busy_s
            if self._under_way:
                now = time.perf_counter()
                busy, self._busy_since = busy + now - self._busy_since, now
            searches = self._searches
            taken = {"time/search_s": busy, "search/searches": float(searches)}
            if searches:
                taken["time/search_wait_s"] = self._waited_s / searches
                taken["search/empty_rate"] = self._empty / searches
                taken["search/duplicate_rate"] = self._repeated / searches
                taken["search/gold_in_top_k"] = self._gold / searches
            self._reset()
        return taken
