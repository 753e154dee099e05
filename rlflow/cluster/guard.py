"""Ends processes after the death of the one that started them: what no handler of a killed process can do."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterable

import psutil

# Waits at its input, which ends with the process that holds the other side, then ends whom it was told of. Started without
# site packages, in a session of its own: it costs 10 MB, and a Ctrl-C in the terminal does not reach it. Whom Ray has started
# since writes to its log folder as the others do: a worker that still starts would ask its dead raylet for half a minute. The
# folder that the guarded process itself writes to, as a job of somebody's cluster does, is that cluster's: nobody ends for it.
_CODE = """
import os, re, signal, sys, time
told, folders = {}, set()
def folder(pid):
    try:
        return os.path.dirname(os.readlink(f"/proc/{pid}/fd/1"))
    except OSError:
        return ""
def started(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return ""
outer = folder(os.getppid())
for line in sys.stdin:
    pid, start = line.split()
    told[int(pid)] = start
    if re.search(r"/session_[^/]+/logs$", folder(pid)) and folder(pid) != outer:
        folders.add(folder(pid))
end = time.monotonic() + GRACE_S
while told and time.monotonic() < end:
    told = {pid: start for pid, start in told.items() if started(pid) == start}
    time.sleep(0.1)
def young():
    return {int(pid) for pid in os.listdir("/proc") if pid.isdigit() and folder(pid) in folders}
left = young() | set(told)
while left and time.monotonic() < end + GRACE_S:
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
    time.sleep(0.1)
    left = young()
"""
GRACE_S = 3.0  # to end by themselves


class Guard:
    """A process that outlives this one by some seconds and ends those it was told of. Linux only: elsewhere it does nothing."""

    def __init__(self) -> None:
        self._told: set[int] = set()
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def protect(self, processes: Iterable[psutil.Process]) -> None:
        """The processes are to end with this one. Told by number and start time, so that no later process is taken for them."""
        if not sys.platform.startswith("linux"):
            return
        new = [process.pid for process in processes if process.pid not in self._told]
        if not new:
            return
        if self._process is None:
            command = [sys.executable, "-I", "-S", "-c", f"GRACE_S = {GRACE_S}\n{_CODE}"]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True,
                start_new_session=True,
            )  # fmt: skip
        assert self._process.stdin is not None
        for pid in new:
            with contextlib.suppress(OSError):  # it has ended, or the guard was killed: nothing that a run should end for
                self._process.stdin.write(f"{pid} {_start_of(pid)}\n")
                self._process.stdin.flush()
                self._told.add(pid)

    def close(self) -> None:
        """Ends the guard; those it was told of have ended before."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _start_of(pid: int) -> str:
    """The start time of a process in ticks, as proc(5) has it."""
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        return file.read().rpartition(")")[2].split()[19]
