"""Child processes: started with a log, waited for, and ended as a whole, whatever ends this one."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path
from typing import TypeVar

from rlflow.errors import RLFlowError
from rlflow.storage import guard
from rlflow.storage.daemon import start_daemon
from rlflow.storage.guard import start_of

logger = logging.getLogger(__name__)

T = TypeVar("T")
POLL_S = 0.2
REPORT_EVERY_S = 10.0
STOP_S = 15.0
"""For a child to end by itself once it was asked to."""
GRACE_S = 3.0
"""The same, where this process was killed and cannot wait for longer."""
LOG_TAIL = 1 << 16  # bytes
PLACE_DESCRIPTORS = """
import fcntl, os, sys
numbers = [int(number) for number in sys.argv[1].split(",")]
copies = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 100) for number in numbers]
for number in set(numbers):
    os.close(number)
for place, copy in enumerate(copies, 3):
    os.dup2(copy, place)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as problem:
    sys.exit(f"Error: {sys.argv[2]} cannot be started ({problem.strerror})")
"""


class Child:
    """A process in a session of its own, so that a Ctrl-C in the terminal is this process's to
    handle, and the child's whole group can be ended.

    It ends with `stop`, with this object, and with this process, which may be killed. `ended`
    resolves to the exit code (minus a signal's number) once the process has ended, and what it
    started was told to.

    name: of the child, as errors and the log have it. log: a file to which its output is appended.
    errors: another one for its stderr. descriptors: of this process, which the program gets as 3, 4
    and so on. error: the class of what is raised. telling: chooses the line of a log that errors
    quote. Raises the error where the program cannot be started."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        variables: Mapping[str, str] | None = None,
        folder: Path | None = None,
        errors: Path | None = None,
        descriptors: Sequence[int] = (),
        error: type[RLFlowError] = RLFlowError,
        telling: Callable[[Sequence[str]], str] | None = None,
    ) -> None:
        self.name, self.log = name, log
        self._error, self._telling = error, telling or telling_line
        self.ended: Future[int] = Future()
        with log.open("ab") as output, (errors or log).open("ab") as said:
            try:
                process = subprocess.Popen(
                    _placing(descriptors, command) if descriptors else command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=said,
                    env=variables,
                    cwd=folder,
                    pass_fds=descriptors,
                    start_new_session=True,
                )
            except OSError as problem:
                raise error(
                    f"{name}: {command[0]} cannot be started ({problem.strerror})."
                ) from None
        self.pid = process.pid
        self._guard = Guard(process.pid)
        start_daemon(f"child-{process.pid}", _reap, process, self.ended)
        self._end = weakref.finalize(self, _end, process.pid, self.ended, os.getpid())

    def wait_until(
        self,
        ready: Callable[[], T | None],
        limit_s: float,
        option: str,
        state: Callable[[], str] = lambda: "",
    ) -> T:
        """What `ready` returns once that is not None; it is asked several times a second.

        option: which sets `limit_s`. state: how far the child has come, for the log and errors.
        Raises the error where the child ends before, or is not ready in time."""
        start = reported = time.monotonic()
        while (found := ready()) is None:
            if self.ended.done():
                raise self._error(f"{self.name} {self.how_it_ended()}")
            now = time.monotonic()
            if now - start > limit_s:
                raise self._error(
                    f"{self.name} is not ready after {limit_s:g} s ({option}): "
                    f"{state() or self.last_words()}."
                )
            if now - reported >= REPORT_EVERY_S:
                reported = now
                logger.warning("waiting for %s (%.0f s): %s", self.name, now - start, state())
            with contextlib.suppress(NotYet):
                self.ended.result(POLL_S)
        logger.info("%s is ready after %.1f s", self.name, time.monotonic() - start)
        return found

    def stop(self, limit_s: float = STOP_S) -> None:
        """Asks the process to end, and ends it with all that it started where it takes longer than
        `limit_s`. Of no effect where it has ended."""
        self._end.detach()
        _end(self.pid, self.ended, os.getpid(), limit_s)
        self._guard.close()

    def how_it_ended(self) -> str:
        """In words, with what it said; waited for."""
        code = self.ended.result(STOP_S)
        if code >= 0:
            return f"ended with code {code}: {self.last_words()}"
        memory = "; was memory used up?" if -code == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{memory}: {self.last_words()}"

    def last_words(self) -> str:
        """How its log ends: the last line that tells of an error, else the last one."""
        lines = [line.strip() for line in tail(self.log).splitlines() if line.strip()]
        said = self._telling(lines)[:400] if lines else "it said nothing"
        return f"{said} (its log: {self.log})"


class Guard:
    """A process that outlives this one by some seconds and ends what it left. Linux only: elsewhere
    nothing happens.

    what: the number of a child that leads a group, or the `NAME=value` that processes were started
    with in their environment."""

    def __init__(self, what: int | str) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if sys.platform.startswith("linux"):
            started = start_of(what) if isinstance(what, int) else ""
            arguments = (guard.__file__, str(os.getpid()), str(GRACE_S), str(what), started)
            # Without the mark, which this process may have set for others
            named = os.environ.items()
            variables = {name: value for name, value in named if f"{name}={value}" != what}
            self._process = start_listener(*arguments, variables=variables, quiet=True)

    def close(self) -> None:
        """Ends the guard; those that it guards have ended before."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _placing(descriptors: Sequence[int], command: Sequence[str]) -> list[str]:
    """A command that runs another one with the descriptors under the numbers from 3 on. (Popen
    keeps the numbers that they have here.)"""
    numbers = ",".join(map(str, descriptors))
    return [sys.executable, "-I", "-S", "-c", PLACE_DESCRIPTORS, numbers, *command]


def start_listener(
    *arguments: str,
    variables: Mapping[str, str] | None = None,
    quiet: bool = False,
    keep: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """An interpreter with these arguments and a pipe as its input, which ends with this process.

    Without site packages, in a session of its own: it costs 10 MB and a Ctrl-C in the terminal does
    not reach it. quiet: it writes nothing on stderr. keep: descriptors that it shares."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", *arguments],
        stdin=subprocess.PIPE,
        env=variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL if quiet else None,
        pass_fds=keep,
        start_new_session=True,
    )


def start_answering(*arguments: str) -> subprocess.Popen[bytes]:
    """An interpreter with these arguments that reads what it is asked from a pipe, and ends with
    it; it answers through another. With all packages that this process finds and none of the
    folder that it stands in, in a session of its own. Its stderr is a pipe, for `last_said`."""
    return subprocess.Popen(
        [sys.executable, "-P", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def last_said(process: subprocess.Popen[bytes]) -> str:
    """The line on the stderr of a process that has ended that tells most."""
    assert process.stderr is not None
    lines = process.stderr.read().decode(errors="replace").strip().split("\n")
    return telling_line(lines) or "it said nothing"


def telling_line(lines: Sequence[str]) -> str:
    """The last line that tells of an error, else the last one."""
    telling = [line for line in lines if "Error" in line] or lines
    return telling[-1].removeprefix("rlflow: ")


def tail(log: Path) -> str:
    """The last 64 KiB of a log; "" where it is gone."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_TAIL))
        return file.read().decode(errors="replace")
    return ""


def _reap(process: subprocess.Popen[bytes], ended: Future[int]) -> None:
    """Waits for the end of a process, ends what is left of its group, tells the exit code. Nobody
    else waits for it: until it is reaped its number belongs to nobody else."""
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    _signal_group(process.pid, signal.SIGKILL)
    ended.set_result(process.wait())


def _end(pid: int, ended: Future[int], owner: int, limit_s: float = GRACE_S) -> None:
    if os.getpid() != owner:
        return  # the child of a fork: the process is its parent's
    if not ended.done() and limit_s > 0:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        with contextlib.suppress(NotYet):
            ended.result(limit_s)
    if not ended.done():
        _signal_group(pid, signal.SIGKILL)
        with contextlib.suppress(NotYet):
            ended.result(GRACE_S)


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)
