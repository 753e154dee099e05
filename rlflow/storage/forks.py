"""Forks of this process, which others' code makes: what a child must not keep, and where it must
not go on."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable


def in_forked_child(method: Callable[[], object]) -> None:
    """Calls the bound method in every process that is forked from now on, as long as its object
    lives."""
    held = weakref.WeakMethod(method)

    def call() -> None:
        bound = held()
        if bound is not None:
            bound()

    os.register_at_fork(after_in_child=call)


def end_forked_child(what: str) -> None:
    """Ends this process, which is the child of a fork and came back from where only its parent goes
    on."""
    told = f"rlflow: {what} forked, and the child came back from it: "
    told += f"it is ended here (process {os.getpid()}). "
    os.write(
        2, f"{told}End it with os._exit, or start it with multiprocessing or subprocess.\n".encode()
    )
    os._exit(1)
