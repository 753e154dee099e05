"""Buckets of weights in the memory of the test's own process."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np


class Held:
    """A bucket in this process, whose content can be damaged."""

    alive: weakref.WeakSet[Held] = weakref.WeakSet()

    def __init__(self, values: list[Any]) -> None:
        self.values = [_copied(value) for value in values]
        Held.alive.add(self)

    def get(self, what: str) -> list[Any]:
        return self.values


def _copied(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, tuple):
        return tuple(map(_copied, value))
    copy = np.array(value)
    copy.flags.writeable = False
    return copy
