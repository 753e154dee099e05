"""Folders in memory that processes of a machine share, which do not outlive the processes that made
them for long."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

PREFIX = "rlflow-"
OWNER = "owner"
"""Of a folder: locked by the process that made it while that lives."""
YOUNG_S = 60.0  # of a folder whose lock may not have been taken yet


class OwnedFolder:
    """A folder for this user alone, removed by `close`, with this object, and at the end of the
    process.

    Where the process is killed, the next one of this user that makes any such folder in `parent`
    removes it: the kernel frees the lock (flock) on its `owner`. prefix: its name begins with
    rlflow- and that. parent: None is /dev/shm. others: whether leftovers are looked for; not where
    machines share `parent`, as locks may not reach from one to another. Raises OSError."""

    def __init__(self, prefix: str, parent: Path | None = None, others: bool = True) -> None:
        parent = shared_memory() if parent is None else parent
        if others:
            remove_leftovers(parent)
        name = f"{PREFIX}{prefix}-{secrets.token_hex(4)}"
        aside = parent / f".{name}"  # without its lock nobody should find it
        aside.mkdir(mode=0o700, parents=True)
        owner = os.open(aside / OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        lock(owner, fcntl.LOCK_EX)
        self.path = aside.rename(parent / name)
        self._end = weakref.finalize(self, _end, self.path, owner)

    def close(self) -> None:
        """Removes it, once."""
        self._end()


def shared_memory() -> Path:
    """/dev/shm, or the folder of temporary files where there is none that can be written to."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def lock(descriptor: int, kind: int) -> bool:
    """Whether the lock was free. The kernel frees it when the file is closed, also by the end of
    the process."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def owner_lives(folder: Path) -> bool:
    """Whether the process that made the folder does."""
    try:
        descriptor = os.open(folder / OWNER, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def remove_leftovers(parent: Path) -> None:
    """Removes this user's folders in `parent` whose processes were killed."""
    for folder in (*parent.glob(f"{PREFIX}*/{OWNER}"), *parent.glob(f".{PREFIX}*")):
        with suppress(OSError):  # removed by somebody else meanwhile
            _remove_leftover(folder.parent if folder.name == OWNER else folder)


def _remove_leftover(folder: Path) -> None:
    status = folder.stat()
    young = folder.name.startswith(".") and time.time() - status.st_mtime < YOUNG_S
    if status.st_uid == os.getuid() and not young and not owner_lives(folder):
        logger.warning("%s was left by a process that has been killed; it is removed", folder)
        _remove(folder)


def _end(folder: Path, owner: int) -> None:
    _remove(folder)
    os.close(owner)


def _remove(folder: Path) -> None:
    """`owner` last, so that what a kill leaves is still a leftover."""
    for path in folder.glob("*"):
        if path.name != OWNER:
            with suppress(OSError):
                path.unlink()
    shutil.rmtree(folder, ignore_errors=True)
