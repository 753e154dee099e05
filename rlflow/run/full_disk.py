"""A full disk as one line that says what is left and how to go on."""

from __future__ import annotations

import errno

from rlflow.errors import StorageError
from rlflow.run.directory import RunDirectory

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def explain_full_disk(error: BaseException | None, directory: RunDirectory) -> None:
    """Raises StorageError, from `error`, where it says that nothing more can be written; returns for any other."""
    if not isinstance(error, OSError) or error.errno not in DISK_FULL:
        return
    latest = directory.latest_checkpoint()
    left = "there is no checkpoint yet" if latest is None else f"the newest checkpoint is that of step {latest[0]}"
    where = error.filename or directory.path
    raise StorageError(f"{where}: {error.strerror}; {left}. Free some space and continue with --resume") from error
