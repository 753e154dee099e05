"""A program that waits until the process that started it is gone, then ends what that one left.

Run by its path, without the packages of an environment: it costs 10 MB. No handler of a killed
process can do this, and the kernel's PR_SET_PDEATHSIG goes by the thread that started a child."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterator


def start_of(pid: int) -> str:
    """The start time of a process in ticks, as proc(5) has it; "" where it has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        fields = file.read().rpartition(")")[2].split()
        return "" if fields[0] == "Z" else fields[19]
    return ""


def marked(mark: str) -> Iterator[int]:
    """The processes that were started with `NAME=value` in their environment. One that changes its
    title may hide it, unless SPT_NOENV is set too."""
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{name}/environ", "rb") as file:
            if mark.encode() in file.read().split(b"\0") and start_of(int(name)):
                yield int(name)


def group(leader: int, started: str) -> Iterator[int]:
    """-leader, as a number for `os.kill`, as long as its process group is there. The group may
    outlive its leader, and keeps its number from others for so long: only a leader that has started
    at another time is somebody else's."""
    if start_of(leader) in ("", started):
        with contextlib.suppress(OSError):
            os.killpg(leader, 0)
            yield -leader


def main(owner: int, grace_s: float, what: str, started: str) -> None:
    """Waits for the end of the owner, asks the others to end and, after `grace_s`, ends them. what:
    a mark, or the leader of a group, with its start time."""
    # Who was forked from the owner without a new program holds the pipe open.
    while not select.select([0], [], [], 1.0)[0]:
        if os.getppid() != owner:
            break
    asked: set[int] = set()
    until = time.monotonic() + grace_s
    while (now := time.monotonic()) < until + grace_s:
        found = set(group(int(what), started) if what.isdigit() else marked(what))
        if not found:
            break
        late = now > until
        for pid in found if late else found - asked:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        asked |= found
        time.sleep(0.1)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4])
