"""An event loop in a thread of its own, so that synchronous callers (notebooks too) can drive asynchronous code."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

T = TypeVar("T")
CANCEL_TIMEOUT_S = 30.0


class Running(Generic[T]):
    """A coroutine that runs in the thread of a loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> None:
        self._loop = loop
        self._future: Future[T] = Future()
        self._task: asyncio.Task[T] | None = None
        loop.call_soon_threadsafe(self._begin, coroutine)

    def result(self) -> T:
        """The coroutine's result. An interrupt of the waiting thread (Ctrl-C) cancels it and waits for its end."""
        try:
            return self._future.result()
        except BaseException:
            self.cancel()
            raise

    @property
    def ended(self) -> bool:
        return self._future.done()

    def cancel(self) -> None:
        """Cancels the coroutine, if it has not ended, and waits until its clean-up is done."""
        if not self._future.done():
            self._loop.call_soon_threadsafe(self._cancel)
            concurrent.futures.wait([self._future], CANCEL_TIMEOUT_S)

    def on_end(self, function: Callable[[], None]) -> None:
        """Calls the function when the coroutine has ended, in the loop's thread (here where it has already)."""
        self._future.add_done_callback(lambda _: function())

    def _begin(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._task = self._loop.create_task(coroutine)
        self._task.add_done_callback(self._finish)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _finish(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self._future.set_exception(concurrent.futures.CancelledError())
        elif (error := task.exception()) is not None:
            self._future.set_exception(error)
        else:
            self._future.set_result(task.result())


class LoopThread:
    """Runs coroutines for any thread, whether or not that thread has a running loop."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Running[T]:
        """Starts the coroutine and returns at once."""
        return Running(self._loop, coroutine)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result, waited for; see `Running.result`."""
        return self.start(coroutine).result()

    def close(self) -> None:
        """Stops the loop and ends its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
