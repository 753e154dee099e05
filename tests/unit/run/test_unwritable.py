"""A disk that is full, broken or gone is one line that says what is left."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from rlflow.errors import StorageError
from rlflow.run.directory import (
    DISK_FAILED,
    DISK_FULL,
    IN_THE_RUN,
    RunDirectory,
    explain_unwritable,
)


@pytest.mark.parametrize("number", DISK_FULL)
def test_the_file_and_the_newest_checkpoint_are_named(number: int, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    error = OSError(number, os.strerror(number), str(tmp_path / "metrics.jsonl"))
    with pytest.raises(
        StorageError,
        match=r"metrics\.jsonl: .+; there is no checkpoint yet\. Free some space and continue",
    ):
        explain_unwritable(error, directory)
    directory.saved.path(20).mkdir(parents=True)
    with pytest.raises(StorageError, match="; the newest checkpoint is that of step 20") as caught:
        explain_unwritable(error, directory)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [None, ValueError("x"), OSError(errno.EACCES, "Permission denied"), KeyboardInterrupt()],
)
def test_every_other_end_is_left_alone(error: BaseException | None, tmp_path: Path) -> None:
    explain_unwritable(error, RunDirectory(tmp_path))


@pytest.mark.parametrize("number", [*DISK_FAILED, *IN_THE_RUN])
def test_a_disk_that_failed_is_told_in_the_same_way(number: int, tmp_path: Path) -> None:
    error = OSError(number, os.strerror(number), str(tmp_path / "run" / "log.txt"))
    with pytest.raises(
        StorageError,
        match=r"log\.txt: .+; there is no checkpoint yet\. Make it writable again and continue",
    ):
        explain_unwritable(error, RunDirectory(tmp_path / "run"))
    if number in IN_THE_RUN:
        explain_unwritable(error, RunDirectory(tmp_path / "another run"))
