"""Calls of others' code: plain functions in threads that cannot keep the process from ending, and
each call with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from queue import SimpleQueue
from typing import Any

from rlflow.errors import RolloutError
from rlflow.storage.daemon import start_daemon
from rlflow.storage.forks import end_forked_child

Answer = Callable[[Any, "BaseException | None"], None]
THREADS = 16
"""For an environment's plain (not async) methods, of each kind."""


def start_call(function: Callable[[], Any], answer: Answer, what: str) -> None:
    """Calls a function in a daemon thread of its own, and `answer` with what it returned or
    raised."""
    start_daemon("rlflow-call", _answer, function, answer, what)


def _answer(function: Callable[[], Any], answer: Answer, what: str) -> None:
    process = os.getpid()
    result, error = None, None
    try:
        result = function()
    except BaseException as raised:  # noqa: BLE001 -- those that a future does not take, too
        error = raised
    if os.getpid() != process:
        end_forked_child(what)
    answer(result, error)


class CallThreads:
    """Daemon threads for plain functions: `limit` calls of a kind at a time, so that those that
    wait for others (for a place that an episode gives back) do not take the others' threads. A call
    that was given up no longer counts, whenever it ends, so hung ones do not use the threads up;
    and none of them keeps the process from ending."""

    def __init__(self, limit: int, name: str) -> None:
        self._places = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(limit))
        self._name = name
        self._lock = threading.Lock()
        self._calls: SimpleQueue[tuple[Callable[[], Any], Answer, str] | None] = SimpleQueue()
        self._idle = 0
        self._closed = False

    async def run(
        self,
        function: Callable[[], Any],
        limit_s: float,
        what: str,
        kind: str = "",
        late: Callable[[Any], object] | None = None,
    ) -> Any:
        """The function's result, out of a thread; see `guarded` for the errors. The deadline starts
        with the call. late: given, in the loop, what comes after it was given up."""
        async with self._places[kind]:
            loop = asyncio.get_running_loop()
            ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

            def take(outcome: tuple[Any, BaseException | None]) -> None:
                if not ended.done():
                    ended.set_result(outcome)
                elif late is not None and outcome[1] is None:
                    late(outcome[0])

            def answer(result: Any, error: BaseException | None) -> None:
                with contextlib.suppress(RuntimeError):  # the loop was closed in the meantime
                    loop.call_soon_threadsafe(take, (result, error))

            self._submit(function, answer, what)
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

    def _submit(self, function: Callable[[], Any], answer: Answer, what: str) -> None:
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                start_daemon(self._name, self._work)
            self._calls.put((function, answer, what))

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            _answer(*call)
            del call  # an idle thread keeps nothing of the last call alive
            with self._lock:
                if self._closed:
                    return
                self._idle += 1


async def call(
    threads: CallThreads,
    method: Callable[..., Any],
    arguments: tuple[Any, ...],
    limit_s: float,
    what: str,
    kind: str = "",
    late: Callable[[Any], object] | None = None,
) -> Any:
    """The result of a plain or async method; a plain one runs in a thread, with so many others of
    its kind. late: given what a plain one returns after it was given up.

    Raises RolloutError where it takes longer than `limit_s`, or ends with what would end the event
    loop (SystemExit and its like) instead of an Exception."""
    if inspect.iscoroutinefunction(method):
        return await guarded(method(*arguments), limit_s, what)
    result = await threads.run(lambda: method(*arguments), limit_s, what, kind, late)
    return await guarded(result, limit_s, what) if inspect.isawaitable(result) else result


async def guarded(awaitable: Awaitable[Any], limit_s: float, what: str) -> Any:
    """Its result within `limit_s` seconds; what is no Exception becomes a RolloutError that names
    it."""
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


class RunningTime:
    """Seconds in which this process ran, by a clock that is looked at every `turn_s`.

    A gap counts as two turns at most: a process that was stopped for a while (a suspended job)
    takes nothing that it waited for as late."""

    def __init__(self, turn_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_s, self._clock = 2 * turn_s, clock
        self._seen = clock()
        self.seconds = 0.0  # at the last look

    def look(self) -> float:
        """The seconds until now."""
        seen, self._seen = self._seen, self._clock()
        self.seconds += min(self._seen - seen, self._most_s)
        return self.seconds


@contextlib.asynccontextmanager
async def deadline(limit_s: float, what: str) -> AsyncIterator[None]:
    """Cancels what is awaited within after `limit_s` seconds of `RunningTime`, and raises
    RolloutError."""
    loop = asyncio.get_running_loop()
    turn_s = min(1.0, limit_s / 16)  # stopped twice, little of a short limit is gone
    passed = RunningTime(turn_s, loop.time)
    timer: asyncio.TimerHandle | None = None

    def turn() -> None:
        nonlocal timer
        left_s = limit_s - passed.look()
        if left_s <= 0:
            timeout.reschedule(loop.time())
        else:
            timer = loop.call_later(min(turn_s, left_s), turn)

    try:
        async with asyncio.timeout(None) as timeout:
            turn()
            yield
    except TimeoutError as error:
        if not timeout.expired():
            raise  # one of the environment's own
        raise RolloutError(f"{what} did not end within {limit_s:g} s") from error
    finally:
        if timer is not None:
            timer.cancel()


def _escaped(error: BaseException, what: str) -> BaseException:
    """The error that an episode can end with."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RolloutError(
        f"{what} raised {error!r}, which is no error of an episode; raise an Exception that says "
        "what failed."
    )
