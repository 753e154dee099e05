"""How a run is closed: whatever ended it, what went wrong first is what is said."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from rlflow.config.schema import RunConfig
from rlflow.errors import RolloutError, StorageError
from rlflow.run.directory import RunDirectory
from rlflow.run.open import open_run
from tests.flow.letters import letters_config, write_letters_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_letters_model(tmp_path_factory.mktemp("letters"))


@pytest.fixture
def config(model: Path, tmp_path: Path) -> RunConfig:
    return letters_config(model, tmp_path, "trainer.backend=reference")


class FailingSink:
    """A sink that cannot write its last lines."""

    def __init__(self, number: int) -> None:
        self.number = number

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None:
        raise OSError(self.number, os.strerror(self.number), "events.out")


def test_a_disk_that_is_full_at_the_very_end_is_a_storage_error(config: RunConfig) -> None:
    words = r"events\.out: .*; the newest checkpoint is that of step 0\."
    with pytest.raises(StorageError, match=words), open_run(config) as run:
        run.save()
        run.metrics.sinks.append(FailingSink(errno.ENOSPC))


def test_another_failure_to_close_is_told_as_it_is(config: RunConfig) -> None:
    with pytest.raises(OSError, match=r"events\.out") as caught, open_run(config) as run:
        run.metrics.sinks.append(FailingSink(errno.EACCES))
    assert caught.value.errno == errno.EACCES


def test_what_went_wrong_first_says_more_than_a_sink_that_cannot_close(config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match="the first"), open_run(config) as run:
        run.metrics.sinks.append(FailingSink(errno.ENOSPC))
        raise RolloutError("the first")
    with RunDirectory.create(tmp_path / "letters", overwrite=True):  # everything else is closed, the lock included
        pass


def test_a_full_disk_in_the_middle_is_a_storage_error(config: RunConfig) -> None:
    with pytest.raises(StorageError, match="there is no checkpoint yet"), open_run(config):
        raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")


def test_an_error_ends_the_save_under_way(model: Path, tmp_path: Path) -> None:
    config = letters_config(model, tmp_path, "checkpoint.asynchronous=true")
    with pytest.raises(RolloutError), open_run(config) as run:
        run.save()
        raise RolloutError("after the save began")
    assert RunDirectory.open(tmp_path / "letters").saved.steps() == [0]
