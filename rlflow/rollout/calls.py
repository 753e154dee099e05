"""Calls of others' code: plain functions in threads that cannot keep the process from ending, and each call with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from queue import SimpleQueue
from typing import Any

from rlflow.errors import RolloutError

Answer = Callable[[Any, "BaseException | None"], None]


class CallThreads:
    """Daemon threads for plain functions: `limit` calls at a time. A call that was given up no longer counts, whenever it
    ends, so hung ones do not use the threads up; and none of them keeps the process from ending."""

    def __init__(self, limit: int, name: str) -> None:
        self._places = asyncio.Semaphore(limit)
        self._name = name
        self._lock = threading.Lock()
        self._calls: SimpleQueue[tuple[Callable[[], Any], Answer] | None] = SimpleQueue()
        self._idle = 0
        self._closed = False

    async def run(self, function: Callable[[], Any], limit_s: float, what: str) -> Any:
        """The function's result, out of a thread; see `guarded` for the errors. The deadline starts with the call."""
        async with self._places:
            loop = asyncio.get_running_loop()
            ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

            def take(outcome: tuple[Any, BaseException | None]) -> None:
                if not ended.done():
                    ended.set_result(outcome)

            def answer(result: Any, error: BaseException | None) -> None:
                with contextlib.suppress(RuntimeError):  # the loop was closed in the meantime
                    loop.call_soon_threadsafe(take, (result, error))

            self._submit(function, answer)
            async with deadline(limit_s, what):
                result, error = await ended
        if error is not None:
            raise _escaped(error, what) from error
        return result

    def close(self) -> None:
        """Ends the threads, those that are busy when their call is over."""
        with self._lock:
            self._closed = True
            for _ in range(self._idle):
                self._calls.put(None)

    def _submit(self, function: Callable[[], Any], answer: Answer) -> None:
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
            self._calls.put((function, answer))

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            function, answer = call
            result, error = None, None
            try:
                result = function()
            except BaseException as raised:  # noqa: BLE001 -- StopIteration and SystemExit too: a future takes neither
                error = raised
            answer(result, error)
            del call, function, answer, result, error  # an idle thread keeps nothing of the last call alive
            with self._lock:
                if self._closed:
                    return
                self._idle += 1


async def call(threads: CallThreads, method: Callable[..., Any], arguments: tuple[Any, ...], limit_s: float, what: str) -> Any:
    """The result of a plain or async method; a plain one runs in a thread.

    Raises RolloutError where it takes longer than `limit_s`, or ends with what would end the event loop (SystemExit and its
    like) instead of an Exception."""
    if inspect.iscoroutinefunction(method):
        return await guarded(method(*arguments), limit_s, what)
    result = await threads.run(lambda: method(*arguments), limit_s, what)
    return await guarded(result, limit_s, what) if inspect.isawaitable(result) else result


async def guarded(awaitable: Awaitable[Any], limit_s: float, what: str) -> Any:
    """Its result within `limit_s` seconds; what is no Exception becomes a RolloutError that names it."""
    try:
        async with deadline(limit_s, what):
            return await awaitable
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # from outside: the collection ends
        raise _escaped(error, what) from error
    except BaseException as error:
        if isinstance(error, Exception):
            raise
        raise _escaped(error, what) from error


@contextlib.asynccontextmanager
async def deadline(limit_s: float, what: str) -> AsyncIterator[None]:
    """Cancels what is awaited within after `limit_s` seconds, and raises RolloutError that says so."""
    try:
        async with asyncio.timeout(limit_s) as timeout:
            yield
    except TimeoutError as error:
        if not timeout.expired():
            raise  # one of the environment's own
        raise RolloutError(f"{what} did not end within {limit_s:g} s") from error


def _escaped(error: BaseException, what: str) -> BaseException:
    """The error that an episode can end with."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RolloutError(f"{what} raised {error!r}, which is no error of an episode; raise an Exception that says what failed.")
