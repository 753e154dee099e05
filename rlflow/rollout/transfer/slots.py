"""Files in memory that processes of a machine share: their locks, their folders, and what killed processes leave of them."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import secrets
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np

logger = logging.getLogger(__name__)

PREFIX = "rlflow-published-"
OWNER = "owner"
"""Of a folder: locked by its publisher while that lives."""
ELSEWHERE = "elsewhere"
"""Of a folder: a link to the one where its slots are, if that is another."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)


class SlotFile:
    """A file that has room for a version, locked by who makes it. Raises OSError where there is no room."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self.content = np.empty(0, np.uint8)  # the file itself
        try:
            self.lock()
            self.grow(size)
        except OSError:
            self.close()
            raise

    def grow(self, size: int) -> None:
        """Makes the file at least so large. Its room is taken now: a write to memory that is not there would end the process.

        Raises OSError where there is none."""
        if size > len(self.content):
            os.posix_fallocate(self.descriptor, len(self.content), size - len(self.content))
            self.content = np.frombuffer(mmap.mmap(self.descriptor, size), np.uint8)

    def cut(self, size: int) -> None:
        """Gives back what lies beyond `size`."""
        if 0 < size < len(self.content):
            self.content = self.content[:size]
            os.ftruncate(self.descriptor, size)

    def lock(self) -> bool:
        """Whether nobody reads it; if so nobody will until `unlock`."""
        return lock(self.descriptor, fcntl.LOCK_EX)

    def unlock(self) -> None:
        """Lets readers in."""
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Removes the file; readers keep what they have mapped."""
        self.path.unlink(missing_ok=True)
        self.content = np.empty(0, np.uint8)
        os.close(self.descriptor)


def lock(descriptor: int, kind: int) -> bool:
    """Whether the lock was free. The kernel frees it when the file is closed, also by the end of the process."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def shared_memory() -> Path:
    """/dev/shm, or the folder of temporary files where there is none that can be written to."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def make_folder(parent: Path) -> tuple[Path, int]:
    """A new folder, for this user alone, and the descriptor that holds its `owner` locked. Raises OSError."""
    name = secrets.token_hex(4)
    aside = parent / f".{PREFIX}{name}"  # without its lock nobody should find it
    aside.mkdir(mode=0o700, parents=True)
    owner = os.open(aside / OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    lock(owner, fcntl.LOCK_EX)
    return aside.rename(parent / f"{PREFIX}{name}"), owner


def owner_lives(folder: Path) -> bool:
    """Whether a publisher holds the folder."""
    try:
        descriptor = os.open(folder / OWNER, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def remove_leftovers(parent: Path) -> None:
    """Removes the folders of publishers that were killed."""
    for folder in parent.glob(f"{PREFIX}*"):
        if (folder / OWNER).exists() and not owner_lives(folder):
            logger.warning("weight transfer: %s was left by a publisher that has been killed; it is removed", folder)
            remove_folder(folder)


def remove_folder(folder: Path) -> None:
    """Removes a folder, and the one where its slots are; `owner` last, so that what is left of it is still a leftover."""
    with suppress(OSError):
        other = (folder / ELSEWHERE).readlink()
        if other.name.startswith(PREFIX):
            shutil.rmtree(other, ignore_errors=True)
    for path in folder.glob("*"):
        if path.name != OWNER:
            with suppress(OSError):
                path.unlink()
    shutil.rmtree(folder, ignore_errors=True)
