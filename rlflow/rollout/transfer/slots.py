"""Files in memory that processes of a machine share, and their locks."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path

import numpy as np

from rlflow.storage.memory_folders import lock

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)


class SlotFile:
    """A file that has room for a version, locked by who makes it. Raises OSError where there is no
    room."""

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
        """Makes the file at least so large. Its room is taken now: a write to memory that is not
        there would end the process.

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
