"""The disk begins to read while the tables of a checkpoint are still read and checked."""

from __future__ import annotations

import os
from pathlib import Path

from rlflow.storage.daemon import start_daemon

AHEAD_BYTES = 2 << 30
STEP_BYTES = 64 << 20


def read_ahead(directory: str | Path) -> None:
    """Asks the kernel for the first bytes of the files under a directory, all alike, AHEAD_BYTES in
    all; returns at once.

    A hint and no more: what cannot be read is for the conversion to say."""
    start_daemon("read-ahead", _ask, Path(directory))


def _ask(directory: Path) -> None:
    descriptors: dict[int, int] = {}  # of files: their sizes
    try:
        for path in sorted(directory.rglob("*")):
            if path.is_file() and path.stat().st_size > STEP_BYTES:
                descriptor = os.open(path, os.O_RDONLY)
                descriptors[descriptor] = os.fstat(descriptor).st_size
        for start in range(0, AHEAD_BYTES // max(1, len(descriptors)), STEP_BYTES):
            for descriptor, size in descriptors.items():
                if start < size:
                    os.posix_fadvise(descriptor, start, STEP_BYTES, os.POSIX_FADV_WILLNEED)
    except OSError:
        pass
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
