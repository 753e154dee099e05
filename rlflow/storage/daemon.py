"""Threads that work beside the others and keep no process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable


def start_daemon(name: str, work: Callable[..., object], *arguments: object) -> threading.Thread:
    """The thread, which works already."""
    thread = threading.Thread(target=work, args=arguments, name=name, daemon=True)
    thread.start()
    return thread
