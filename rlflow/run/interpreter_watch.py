"""Ends a run in which one call holds Python's interpreter: no thread of the run could say so, or keep any other deadline."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import threading

BEAT_S = 0.5
WORD_S = 10.0
"""Of silence, after which the call is named. A run that is alive beats every BEAT_S, also under load."""
FLOOR_S = 60.0
"""Below which nothing is ended: a large library that is loaded from a slow disk holds the interpreter too."""

# Reads the beats of its parent, and counts the seconds without one, but for those in which the parent is stopped (suspended
# by a job scheduler, or in a debugger). The parent's signal handler, in C, writes the stack of the thread that it reaches:
# the one that works. Started without site packages, in a session of its own, as the guard of ranks is.
_CODE = """
import ctypes, os, select, signal, sys, time
pid, number, word_s, limit_s, what = *map(int, sys.argv[1:5]), sys.argv[5]
def stat(path):
    with open(path) as file:
        return file.read().rpartition(")")[2].split()
def ticks():
    found = {}
    for one in os.listdir(f"/proc/{pid}/task"):
        try:
            found[int(one)] = int(stat(f"/proc/{pid}/task/{one}/stat")[11])
        except OSError:
            pass
    return found
def busiest():
    before = ticks()
    time.sleep(0.5)
    return max(ticks().items(), key=lambda item: item[1] - before.get(item[0], item[1]))[0]
silent = 0
try:
    while os.getppid() == pid:
        if select.select([0], [], [], 1.0)[0]:
            if not os.read(0, 4096):
                break
            silent = 0
            continue
        silent += stat(f"/proc/{pid}/stat")[0] not in "Tt"
        if silent == word_s:
            told = f"one call holds the interpreter, nothing else has run for {silent} s; it has {limit_s} s. It is in:"
            print(f"rlflow: {told}", file=sys.stderr, flush=True)
            ctypes.CDLL(None).tgkill(pid, busiest(), number)
        if silent >= limit_s:
            told = f"ended: one call has held the interpreter for {limit_s} s ({what})"
            print(f"rlflow: {told}. Release the GIL in it, or call it in a process of its own.", file=sys.stderr)
            os.kill(pid, signal.SIGKILL)
            break
except OSError:
    pass
"""


class InterpreterWatch:
    """A process that is told every half second, within a `with` block, that Python still runs here. Where it hears nothing for
    WORD_S it writes on stderr where the call is that holds the interpreter, and after `limit_s` it kills the run: what the
    last checkpoint holds is kept. limit_s: FLOOR_S at the least; what: the option that sets it. Linux only: elsewhere it
    does nothing."""

    def __init__(self, limit_s: float, what: str = "rollout.faults.call_s, 60 s at the least") -> None:
        self._seconds = [str(int(WORD_S)), str(int(max(limit_s, FLOOR_S)))]
        self._what = what
        self._ended = threading.Event()

    def __enter__(self) -> InterpreterWatch:
        if sys.platform.startswith("linux"):
            number = signal.SIGRTMAX - 3
            faulthandler.register(number, file=2, all_threads=False)
            command = [sys.executable, "-I", "-S", "-c", _CODE, str(os.getpid()), str(number), *self._seconds, self._what]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
            )
            self._thread = threading.Thread(target=self._beat, name="rlflow-beat", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if sys.platform.startswith("linux"):
            self._thread.join()
            self._process.kill()
            self._process.wait()

    def _beat(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as beats:  # the watch was killed: the run goes on without
            while not self._ended.wait(BEAT_S):
                beats.write(b".")
                beats.flush()
