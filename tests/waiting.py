"""Waiting for what happens in another thread or process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(happened: Callable[[], T], within_s: float = 60.0) -> T:
    """What `happened()` returns once it is something."""
    end = time.monotonic() + within_s
    while not (found := happened()):
        assert time.monotonic() < end, f"it did not happen within {within_s:g} s"
        time.sleep(0.01)
    return found
