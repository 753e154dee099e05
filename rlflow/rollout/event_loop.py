"""An event loop in a thread of its own, so that synchronous callers (notebooks too) can drive
asynchronous code."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from rlflow.errors import RolloutError
from rlflow.storage.forks import end_forked_child, in_forked_child

logger = logging.getLogger(__name__)
T = TypeVar("T")
CANCEL_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 5.0
MOST_THREADS = 4096
"""Of `asyncio.to_thread`: agents may wait there for responses, one per episode."""


class Running(Generic[T]):
    """A coroutine that runs in the thread of a loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._future: Future[T] = Future()
        self._task: asyncio.Task[T] | None = None

    def result(self) -> T:
        """The coroutine's result. An interrupt of the waiting thread (Ctrl-C) cancels it and waits
        for its end."""
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
        cancel_all([self])

    def on_end(self, function: Callable[[], object]) -> None:
        """Calls the function when the coroutine has ended, in the loop's thread (here where it has
        already)."""
        self._future.add_done_callback(lambda _: function())

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> None:
        """Runs the coroutine; called once, in the loop's thread."""
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


def cancel_all(running: Sequence[Running[Any]]) -> None:
    """Cancels the coroutines that have not ended, and waits until their clean-up is done."""
    left = [one for one in running if not one.ended]
    for one in left:
        one._loop.call_soon_threadsafe(one._cancel)
    concurrent.futures.wait([one._future for one in left], CANCEL_TIMEOUT_S)


class LoopThread:
    """Runs coroutines for any thread, whether or not that thread has a running loop."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(MOST_THREADS, name))
        self._closed = False
        self._forked = False
        self.on_wait: Callable[[], object] = lambda: None
        """Called by whoever waits for this loop's work, every `LoopWatch.poll_s`."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        in_forked_child(self._end_if_forked_here)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Running[T]:
        """Starts the coroutine and returns at once."""
        return self.start_all([coroutine])[0]

    def start_all(self, coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[Running[T]]:
        """Starts the coroutines together: all of them before anything that they wait for comes
        back."""
        running = [Running[T](self._loop) for _ in coroutines]

        def begin() -> None:
            for one, coroutine in zip(running, coroutines, strict=True):
                one.begin(coroutine)

        self._loop.call_soon_threadsafe(begin)
        return running

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result, waited for; see `Running.result`."""
        return self.start(coroutine).result()

    def watch(self, limit_s: float) -> LoopWatch:
        """Who waits for this loop's work asks it from time to time whether the loop still turns."""
        return LoopWatch(self, limit_s)

    def ask(self) -> threading.Event:
        """Set by the loop when it turns."""
        answered = threading.Event()
        self._loop.call_soon_threadsafe(answered.set)
        return answered

    def answers(self, timeout_s: float = CANCEL_TIMEOUT_S) -> bool:
        """Whether the loop turns, or does so again in time."""
        return self.ask().wait(timeout_s)

    def place(self) -> str:
        """The place in the code that it is at."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        if frame is None:
            return "no code"
        return f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"

    def close(self) -> None:
        """Stops the loop and ends its thread; one that does not end is left alone, and does not
        keep the process from ending."""
        self._closed = True
        self._loop.call_soon_threadsafe(self._cancel_and_stop)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning(
                "%s: still in %s after %g s; left alone",
                self._thread.name,
                self.place(),
                CLOSE_TIMEOUT_S,
            )
        else:
            self._loop.close()

    def _cancel_and_stop(self) -> None:
        for task in asyncio.all_tasks(self._loop):  # asyncio complains of those that a loop leaves
            task.cancel()
        self._loop.call_soon(self._loop.stop)

    def _end_if_forked_here(self) -> None:
        """In the child of a fork that a coroutine made: what comes back to the loop, whose sockets
        are the parent's, ends."""
        if threading.get_ident() == self._thread.ident:
            self._forked = True
            self._loop.stop()

    def _run(self) -> None:
        while not self._closed:
            if self._forked:
                end_forked_child(f"{self._thread.name}: an async method")
            try:
                self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt):
                # asyncio lets these two out of the loop. They are in the future of the task that
                # raised them, so whoever waits for that one hears of it; all others would wait for
                # ever for a loop that has ended.
                logger.warning(
                    "%s: something in the event loop tried to end the process",
                    self._thread.name,
                    exc_info=True,
                )


async def settle(most_turns: int = 32) -> None:
    """Lets the event loop turn until nothing is ready, so many times at most.

    For a caller that computes in the loop: what takes others several turns, as a request over a
    socket takes twenty, would else take as many of its steps."""
    ready = getattr(asyncio.get_running_loop(), "_ready", ())  # there is no public word for it
    quiet = 0
    for _ in range(most_turns):
        await asyncio.sleep(0)
        quiet = 0 if ready else quiet + 1
        if quiet == 2:  # sockets are looked at in between
            return


class LoopWatch:
    """Whether a loop's thread still answers: a loop that a callback blocks cannot keep its own
    deadlines."""

    def __init__(self, thread: LoopThread, limit_s: float) -> None:
        self.poll_s = min(1.0, limit_s / 4)
        self._thread, self._limit_s = thread, limit_s
        self._answered = thread.ask()
        self._unanswered = 0

    def check(self) -> None:
        """Called every `poll_s`. Raises RolloutError where the loop has not answered for `limit_s`,
        counted in calls, so that a process that was stopped for a while is not blamed."""
        self._thread.on_wait()
        if self._answered.is_set():
            self._unanswered = 0
            self._answered = self._thread.ask()
            return
        self._unanswered += 1
        if self._unanswered * self.poll_s > self._limit_s:
            raise RolloutError(
                f"rollout: its event loop has not answered for {self._limit_s:g} s "
                f"(rollout.faults.call_s), it is in {self._thread.place()}. An async method must "
                "not block; a plain one (def, not async def) runs in a thread."
            )


async def all_of(awaitables: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results, when all have ended. Raises what the first one in their order raised."""
    found = await asyncio.gather(*awaitables, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found  # type: ignore[return-value]
