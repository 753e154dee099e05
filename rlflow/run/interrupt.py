"""Ends of a run that no step brings about.

Ctrl-C and SIGTERM end it at once while it is being built; afterwards the loop asks between steps.
Two watches look for what hangs: a call that holds the interpreter, and a trainer that does not
move."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
from types import FrameType
from typing import Any

from rlflow.cluster.watching import Stillness, Work
from rlflow.report.timer import PhaseTimer
from rlflow.run import silence
from rlflow.storage.child import start_listener
from rlflow.storage.daemon import start_daemon
from rlflow.storage.forks import in_forked_child

logger = logging.getLogger(__name__)

GRACE_S = 20.0
"""How long what is open may take to close, after a signal that ends the program at once."""


class Stopped(KeyboardInterrupt):
    """A signal that ends the program at once; what is open is closed on the way."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class Interrupt:
    """While active, SIGINT and SIGTERM raise Stopped; once `graceful` is set, the first one only
    sets `requested`.

    Whatever hangs then: where closing takes longer than `grace_s`, or a further signal comes, a
    thread ends the process without it. Outside the main thread (a notebook's worker, for one)
    signals stay as they are and `requested` stays None."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self.requested: str | None = None  # the signal's name
        self.graceful = False
        self._grace_s = grace_s
        self._previous: dict[int, Any] = {}
        self._closing = contextlib.ExitStack()

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            # Python's own handlers run in the main thread only, between two of its instructions:
            # never, where it is stuck in native code. The number of a signal is written to this
            # socket at once.
            reader, writer = socket.socketpair()
            writer.setblocking(False)
            previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
            watcher = start_daemon("rlflow-signals", self._watch, reader)
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._receive)
            self._closing.callback(reader.close)
            self._closing.callback(watcher.join)
            self._closing.callback(writer.close)
            # The watcher reads the end of the stream and ends, whatever children of a fork still
            # hold the socket.
            self._closing.callback(writer.shutdown, socket.SHUT_WR)
            self._closing.callback(signal.set_wakeup_fd, previous)
            in_forked_child(self._leave_to_parent)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        self._closing.close()

    def _leave_to_parent(self) -> None:
        """In the child of a fork: signals are its own, not questions to the run."""
        if self._previous:
            signal.set_wakeup_fd(-1)
            for number, handler in self._previous.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested or not self.graceful:
            raise Stopped(number)
        self.requested = signal.Signals(number).name
        logger.warning(
            "%s: finishing this step, then saving; once more stops at once",
            self.requested,
        )

    def _watch(self, reader: socket.socket) -> None:
        """Waits for the signal that ends the program at once; ends the process where that does not
        happen in `grace_s`, or where one more signal comes."""
        asked = False
        while number := _next_signal(reader):
            if self.graceful and not asked:
                asked = True
                continue
            reader.settimeout(self._grace_s)
            try:
                if _next_signal(reader) == 0:
                    return  # all was closed in time
            except TimeoutError:
                pass
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "no code"
            text = (
                f"rlflow: {signal.Signals(number).name}: the process ends without closing what "
                f"hangs (in {place}).\n"
            )
            os.write(2, text.encode())
            os._exit(128 + number)


def _next_signal(reader: socket.socket) -> int:
    """The number of the next SIGINT or SIGTERM; 0 at the end of the stream. Raises TimeoutError by
    the socket's timeout."""
    while read := reader.recv(1):
        if read[0] in (signal.SIGINT, signal.SIGTERM):
            return read[0]
    return 0


BEAT_S = 0.5
WORD_S = 10.0
"""Of silence, after which the call is named. A run that is alive beats every BEAT_S, also under
load."""
FLOOR_S = 60.0
"""Below which nothing is ended: a large library that is loaded from a slow disk holds the
interpreter too."""


class InterpreterWatch:
    """A process that is told every half second, within a `with` block, that Python still runs here.
    Where it hears nothing for WORD_S it writes on stderr where the call is that holds the
    interpreter, and after `limit_s` it kills the run: what the last checkpoint holds is kept.
    limit_s: FLOOR_S at the least; what: the option that sets it. Linux only: elsewhere it does
    nothing."""

    def __init__(
        self, limit_s: float, what: str = "rollout.faults.call_s, 60 s at the least"
    ) -> None:
        self._seconds = [str(int(WORD_S)), str(int(max(limit_s, FLOOR_S)))]
        self._what = what
        self._ended = threading.Event()

    def __enter__(self) -> InterpreterWatch:
        if sys.platform.startswith("linux"):
            number = signal.SIGRTMAX - 3
            reader, self._stack = os.pipe()
            os.set_blocking(self._stack, False)  # the handler must not wait for a reader
            faulthandler.register(number, file=self._stack, all_threads=False)
            numbers = (str(os.getpid()), str(number), *self._seconds, str(reader))
            self._process = start_listener(silence.__file__, *numbers, self._what, keep=(reader,))
            os.close(reader)
            self._thread = start_daemon("rlflow-beat", self._beat)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if sys.platform.startswith("linux"):
            self._thread.join()
            self._process.kill()
            self._process.wait()
            faulthandler.unregister(signal.SIGRTMAX - 3)
            os.close(self._stack)

    def _beat(self) -> None:
        assert self._process.stdin is not None
        # The watch was killed: the run goes on without
        with contextlib.suppress(OSError), self._process.stdin as beats:
            while not self._ended.wait(BEAT_S):
                beats.write(b".")
                beats.flush()


logger = logging.getLogger(__name__)

OTHERS = ("", "rollout", "evaluate")
"""Phases in which the run waits for episodes, which have deadlines of their own."""
LOOK_EVERY_S = 5.0


class Watchdog:
    """A thread that looks at the thread which makes it, within a `with` block: where that one has
    not moved in a phase of the trainer for `limit_s`, the log says so once, with phase and stack. A
    run that hangs is not ended: nothing could tell whether the call, which is in this very process,
    would still return."""

    def __init__(self, timer: PhaseTimer, limit_s: float) -> None:
        self._timer = timer
        self._limit_s = limit_s
        self._look_every_s = min(LOOK_EVERY_S, limit_s / 4)
        self._work = Work()
        self._work.begin("run")
        self._ended = threading.Event()

    def __enter__(self) -> Watchdog:
        self._thread = start_daemon("rlflow-watchdog", self._watch)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        phase, told = "", False
        stillness = Stillness(self._limit_s)
        while not self._ended.wait(self._look_every_s):
            now = self._timer.current
            if now != phase:
                phase, told, stillness = now, False, Stillness(self._limit_s)
            doing = self._work.look()
            if phase not in OTHERS and not told and stillness.look({0: doing}):
                told = True
                logger.error(
                    "%s: the trainer has not moved for %g s (cluster.stall_timeout_s): %s\n%s",
                    phase,
                    self._limit_s,
                    doing.place,
                    doing.stack(),
                )
