"""A disk that is full, broken or gone as one line that says what is left and how to go on."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from rlflow.errors import StorageError
from rlflow.run.directory import RunDirectory

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DISK_FAILED = (errno.EROFS, errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO)
IN_THE_RUN = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM)
"""Say something about the disk only of a file of the run."""


def explain_unwritable(error: BaseException | None, directory: RunDirectory) -> None:
    """Raises StorageError, from `error`, where it says that nothing more can be written; returns for any other."""
    if not isinstance(error, OSError):
        return
    if error.errno in DISK_FULL:
        remedy = "Free some space"
    elif error.errno in DISK_FAILED or (error.errno in IN_THE_RUN and _inside(error.filename, directory.path)):
        remedy = "Make it writable again"
    else:
        return
    latest = directory.latest_checkpoint()
    left = "there is no checkpoint yet" if latest is None else f"the newest checkpoint is that of step {latest[0]}"
    where = error.filename or directory.path
    raise StorageError(f"{where}: {error.strerror}; {left}. {remedy} and continue with --resume") from error


def _inside(file: object, directory: Path) -> bool:
    return isinstance(file, (str, os.PathLike)) and Path(file).absolute().is_relative_to(directory.absolute())
