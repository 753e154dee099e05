"""Standard output that nobody reads any more, as behind `| head -1`."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable


def end_quietly(run: Callable[[], int]) -> int:
    """Runs a command and returns its exit status; 0 where its output is no longer read.

    A pipe to somebody else that breaks is an error as before."""
    status = 0
    try:
        try:
            status = run()
        finally:
            sys.stdout.flush()  # else the interpreter finds out at its end, and says so
    except BrokenPipeError:
        if _is_read():
            raise
        # What is left in the buffer goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def _is_read() -> bool:
    stdout = select.poll()
    stdout.register(sys.stdout.fileno(), 0)
    return not any(events & (select.POLLERR | select.POLLHUP) for _, events in stdout.poll(0))
