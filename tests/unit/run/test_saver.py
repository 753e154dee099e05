"""When a run's checkpoints are written, and what becomes of one that cannot be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlflow.errors import StorageError
from rlflow.run.checkpoints import Checkpoints, read_state
from rlflow.run.saver import Saver
from rlflow.trainer.base import Trainer


class SlowDisk(Trainer):
    """A trainer whose background saves end when `ready` is set, and fail where `full` is."""

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.full = False
        self.writing: Path | None = None

    def save(self, path: str | Path, step: int) -> None:
        self.begin_save(path, step)
        self.ready.set()
        self.finish_save()

    def begin_save(self, path: str | Path, step: int) -> None:
        self.writing = Path(path)

    def finish_save(self, wait: bool = True) -> bool:
        if self.writing is None:
            return True
        if not wait and not self.ready.is_set():
            return False
        self.ready.wait()
        path, self.writing = self.writing, None
        if self.full:
            raise StorageError(f"{path}: the checkpoint cannot be written (OSError: No space left on device).")
        path.mkdir()
        return True

    def load(self, path: str | Path) -> int: ...  # type: ignore[empty-body]
    def score(self, *arguments: Any, **options: Any) -> dict[str, Any]: ...  # type: ignore[empty-body]
    def update(self, *arguments: Any) -> dict[str, float]: ...  # type: ignore[empty-body]
    def snapshot(self, name: str) -> None: ...
    def weights(self) -> Iterator[Any]: ...  # type: ignore[empty-body]


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints")


def test_an_asynchronous_save_becomes_a_checkpoint_when_it_is_on_disk_with_the_state_of_its_step(
    checkpoints: Checkpoints,
) -> None:
    saver = Saver(SlowDisk(), checkpoints, keep=2, asynchronous=True)
    state = {"step": 1, "list": [1]}
    saver.save(1, state)
    state["list"].append(2)  # the run goes on
    saver.poll()
    assert checkpoints.steps() == []
    saver.trainer.ready.set()
    saver.poll()
    assert checkpoints.steps() == [1] and read_state(checkpoints.path(1)) == {"step": 1, "list": [1]}
    saver.poll()  # nothing under way
    saver.finish()


def test_the_next_save_and_the_end_wait_for_the_one_under_way(checkpoints: Checkpoints) -> None:
    saver = Saver(SlowDisk(), checkpoints, keep=2, asynchronous=True)
    saver.save(1, {})
    threading.Timer(0.1, saver.trainer.ready.set).start()
    saver.save(2, {})
    assert checkpoints.steps() == [1]
    saver.finish()
    assert checkpoints.steps() == [1, 2]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_costs_no_checkpoint_gives_the_space_back_and_names_the_newest(
    asynchronous: bool, checkpoints: Checkpoints
) -> None:
    saver = Saver(SlowDisk(), checkpoints, keep=1, asynchronous=asynchronous)
    saver.trainer.full = True
    saver.trainer.ready.set()
    with pytest.raises(StorageError, match=r"No space left on device\)\. There is no checkpoint yet; free some space"):
        saver.save(1, {})
        saver.poll()
    saver.trainer.full = False
    saver.save(2, {})
    saver.finish()
    saver.trainer.full = True
    with pytest.raises(StorageError, match=r"^saving step 3: .*newest checkpoint is that of step 2; .*--resume$"):
        saver.save(3, {})
        saver.poll()
    assert checkpoints.steps() == [2] and [path.name for path in checkpoints.folder.iterdir()] == ["step_000002"]
    saver.finish()  # what failed is not tried again
