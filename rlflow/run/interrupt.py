"""Ctrl-C and SIGTERM: at once while a run is being built, as a question that the loop asks between steps afterwards."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from types import FrameType
from typing import Any

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
    """While active, SIGINT and SIGTERM raise Stopped; once `graceful` is set, the first one only sets `requested`.

    Whatever hangs then: where closing takes longer than `grace_s`, or a further signal comes, a thread ends the process without
    it. Outside the main thread (a notebook's worker, for one) signals stay as they are and `requested` stays None.
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self.requested: str | None = None  # the signal's name
        self.graceful = False
        self._grace_s = grace_s
        self._previous: dict[int, Any] = {}
        self._closing = contextlib.ExitStack()

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            # Python's own handlers run in the main thread only, between two of its instructions: never, where it is stuck in
            # native code. The number of a signal is written to this socket at once.
            reader, writer = socket.socketpair()
            writer.setblocking(False)
            previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
            watcher = threading.Thread(target=self._watch, args=(reader,), name="rlflow-signals", daemon=True)
            watcher.start()
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._receive)
            self._closing.callback(reader.close)
            self._closing.callback(watcher.join)
            self._closing.callback(writer.close)
            # The watcher reads the end of the stream and ends, whatever children of a fork still hold the socket.
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
        logger.warning("%s: finishing this step, then saving; once more stops at once", self.requested)

    def _watch(self, reader: socket.socket) -> None:
        """Waits for the signal that ends the program at once; ends the process where that does not happen in `grace_s`, or where
        one more signal comes."""
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
            text = f"rlflow: {signal.Signals(number).name}: the process ends without closing what hangs (in {place}).\n"
            os.write(2, text.encode())
            os._exit(128 + number)


def _next_signal(reader: socket.socket) -> int:
    """The number of the next SIGINT or SIGTERM; 0 at the end of the stream. Raises TimeoutError by the socket's timeout."""
    while read := reader.recv(1):
        if read[0] in (signal.SIGINT, signal.SIGTERM):
            return read[0]
    return 0
