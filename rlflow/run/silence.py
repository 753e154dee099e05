"""A program that hears whether its parent still runs Python, names the call that keeps it from
that, and ends a parent that stays silent.

Run by its path, without the packages of an environment, as the guard of children is. The parent's
signal handler, in C, writes the stack of the thread that it reaches into a pipe: the one that
works. Seconds in which the parent is stopped (suspended by a job scheduler, or in a debugger) are
not counted."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import sys
import time

Frame = tuple[str, str, str]
"""File, line, function."""
_FRAME = re.compile(r'File "(.*)", line (\S+) in (.*)')
_PACKAGES = ("/site-packages/", "/dist-packages/")
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SHOWN, INNERMOST = 10, 5  # frames of a long stack; of those the innermost, whatever they are


def frames_of(text: str) -> list[Frame]:
    """The frames that `faulthandler` wrote, innermost first."""
    return [(file, line, name) for file, line, name in _FRAME.findall(text)]


def described(frames: list[Frame], silent_s: int, limit_s: int) -> str:
    """What holds the interpreter: an import in one line, another call with the frames that
    matter."""
    since = f"nothing else has run for {silent_s} s; it has {limit_s} s"
    if any(_imports(frame) for frame in frames):
        inner = next((frame for frame in frames if not _imports(frame)), frames[0])
        place = f"{inner[0]}:{inner[1]}"
        return f"importing {_module(frames)} takes long: slow disk? {since} (at {place})"
    shown = _chosen(frames)
    lines = [f'  File "{file}", line {line} in {name}' for file, line, name in shown]
    if len(shown) < len(frames):
        lines.append(f"  ({len(shown)} of {len(frames)} frames)")
    return "\n".join([f"one call holds the interpreter, {since}. It is in:", *lines])


def _imports(frame: Frame) -> bool:
    return frame[0].startswith("<frozen importlib") or "/importlib/" in frame[0]


def _module(frames: list[Frame]) -> str:
    """The package whose import it is: the first one that did not come with rlflow, else the module
    that is being run."""
    bodies = [file for file, _, name in frames if name == "<module>"]
    for file in reversed(bodies):
        for folder in _PACKAGES:
            _, there, inside = file.rpartition(folder)
            if there and not inside.startswith("rlflow"):
                return inside.split("/")[0].removesuffix(".py")
    return os.path.basename(bodies[0]) if bodies else "a module"


def _chosen(frames: list[Frame]) -> list[Frame]:
    """The innermost frames and, of the others, those of the user's own files."""
    if len(frames) <= SHOWN:
        return frames
    own = [frame for frame in frames[INNERMOST:] if _is_users(frame[0])]
    return frames[:INNERMOST] + own[: SHOWN - INNERMOST]


def _is_users(file: str) -> bool:
    libraries = (*_PACKAGES, f"/python{sys.version_info[0]}.")
    return not file.startswith(("<", _OWN + "/")) and not any(part in file for part in libraries)


def _stat(path: str) -> list[str]:
    with open(path) as file:
        return file.read().rpartition(")")[2].split()


def _busiest(pid: int) -> int:
    """The thread that used the processor most within half a second."""

    def ticks() -> dict[int, int]:
        found = {}
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):  # it has ended
                found[int(thread)] = int(_stat(f"/proc/{pid}/task/{thread}/stat")[11])
        return found

    before = ticks()
    time.sleep(0.5)
    return max(ticks().items(), key=lambda item: item[1] - before.get(item[0], item[1]))[0]


def _read_stack(reader: int) -> str:
    """What comes through the pipe, until nothing has come for half a second."""
    text = b""
    while len(text) < 1 << 16 and select.select([reader], [], [], 0.5)[0]:
        part = os.read(reader, 4096)
        if not part:
            break
        text += part
    return text.decode(errors="replace")


def _say(text: str) -> None:
    sys.stderr.write(f"rlflow: {text}\n")
    sys.stderr.flush()


def listen(pid: int, number: int, word_s: int, limit_s: int, reader: int, what: str) -> None:
    """Listens to the beats on stdin until they end, or the parent does."""
    silent_s = 0
    while os.getppid() == pid:
        if select.select([0], [], [], 1.0)[0]:
            if not os.read(0, 4096):
                return
            silent_s = 0
            continue
        silent_s += _stat(f"/proc/{pid}/stat")[0] not in "Tt"
        if silent_s == word_s:
            ctypes.CDLL(None).tgkill(pid, _busiest(pid), number)
            _say(described(frames_of(_read_stack(reader)), silent_s, limit_s))
        if silent_s >= limit_s:
            told = f"ended: one call has held the interpreter for {limit_s} s ({what})"
            _say(f"{told}. Release the GIL in it, or call it in a process of its own.")
            os.kill(pid, signal.SIGKILL)
            return


if __name__ == "__main__":
    parent, number, word_s, limit_s, reader = map(int, sys.argv[1:6])
    with contextlib.suppress(OSError):
        listen(parent, number, word_s, limit_s, reader, sys.argv[6])
