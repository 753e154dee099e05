"""Actors that go on on their own: each plays one attempt after another, and nobody waits for the slowest."""

from __future__ import annotations

import itertools
import queue
import threading
from typing import Any


class Actors:
    """`count` threads that collect groups of one task from a rollout until the end of `with`, each with the weights that the
    engine has at that moment."""

    def __init__(self, rollout: Any, task: Any, count: int) -> None:
        self._rollout, self._task = rollout, task
        self._numbers = itertools.count()
        self._groups: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._over = threading.Event()
        self._failure: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._play, name=f"actor {number}", daemon=True)
            for number in range(count)
        ]

    def finished(self) -> list[Any]:
        """The groups that ended since the last call. Raises what an actor ended with."""
        if self._failure is not None:
            raise self._failure
        return [self._groups.get() for _ in range(self._groups.qsize())]

    def _play(self) -> None:
        try:
            while not self._over.is_set():
                for group in self._rollout.collect(
                    [self._task], step=next(self._numbers)
                ):  # a step of its own has seeds of its own
                    self._groups.put(group)
        except BaseException as failure:  # noqa: BLE001 -- raised in the thread that asks
            self._failure = failure

    def __enter__(self) -> Actors:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(30)
