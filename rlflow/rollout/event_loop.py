"""An event loop in a thread of its own, so that synchronous callers (notebooks too) can drive asynchronous code."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
CANCEL_TIMEOUT_S = 30.0


class LoopThread:
    """Runs coroutines one call at a time from any thread, whether or not that thread has a running loop."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. An interrupt of the waiting thread (Ctrl-C) cancels the coroutine and waits for its
        end."""
        ended = threading.Event()
        future: Future[T] = asyncio.run_coroutine_threadsafe(_signalling(coroutine, ended), self._loop)
        try:
            return future.result()
        except BaseException:
            if future.cancel():
                ended.wait(CANCEL_TIMEOUT_S)
            raise

    def close(self) -> None:
        """Stops the loop and ends its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _signalling(coroutine: Coroutine[Any, Any, T], ended: threading.Event) -> T:
    try:
        return await coroutine
    finally:
        ended.set()
