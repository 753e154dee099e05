"""When a run's checkpoints are written, and what becomes of one that cannot be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlflow.errors import DirectoryLostError, StorageError
from rlflow.run.checkpoints import Checkpoints, Saver, read_state
from rlflow.trainer.base import Trainer


class SlowDisk(Trainer):
    """A trainer whose background saves end when `ready` is set, and fail where `full` is."""

    def __init__(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.ready, self.meanwhile = threading.Event(), meanwhile
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
        self.meanwhile()
        if self.full:
            raise StorageError(
                f"{path}: the checkpoint cannot be written (OSError: No space left on device)."
            )
        path.mkdir(parents=True)
        return True

    def load(self, path: str | Path) -> int: ...  # type: ignore[empty-body]
    def score(self, *arguments: Any, **options: Any) -> dict[str, Any]: ...  # type: ignore[empty-body]
    def update(self, *arguments: Any) -> dict[str, float]: ...  # type: ignore[empty-body]
    def snapshot(self, name: str) -> None: ...
    def weights(self, device: str | None = "cpu") -> Iterator[Any]: ...  # type: ignore[empty-body]


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
    assert checkpoints.steps() == [1] and read_state(checkpoints.path(1)) == {
        "step": 1,
        "list": [1],
    }
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
    with pytest.raises(
        StorageError,
        match=r"No space left on device\); there is no checkpoint yet\. Free some space",
    ):
        saver.save(1, {})
        saver.poll()
    saver.trainer.full = False
    saver.save(2, {})
    saver.finish()
    saver.trainer.full = True
    with pytest.raises(
        StorageError, match=r"^saving step 3: .*newest checkpoint is that of step 2\. .*--resume$"
    ):
        saver.save(3, {})
        saver.poll()
    assert checkpoints.steps() == [2] and [path.name for path in checkpoints.folder.iterdir()] == [
        "step_000002"
    ]
    saver.finish()  # what failed is not tried again


@pytest.mark.parametrize("asynchronous", [False, True])
def test_who_lost_the_directory_names_no_checkpoint_and_leaves_that_of_its_successor_alone(
    asynchronous: bool, tmp_path: Path
) -> None:
    """While the trainer writes, another process takes the directory and begins the same step."""
    lost: list[bool] = []

    def confirm() -> None:
        if lost:
            raise DirectoryLostError("another one has it")

    def steal() -> None:
        (theirs.begin(1) / "weights").write_text("theirs")
        lost.append(True)

    ours, theirs = Checkpoints(tmp_path, confirm), Checkpoints(tmp_path)
    saver = Saver(SlowDisk(steal), ours, keep=1, asynchronous=asynchronous)
    with pytest.raises(DirectoryLostError):
        saver.save(1, {"step": 1})
        saver.trainer.ready.set()
        saver.poll()
    with pytest.raises(DirectoryLostError):
        saver.update_state(1, {"step": 1})
    assert theirs.steps() == [] and (theirs.partial / "weights").read_text() == "theirs"
    theirs.commit(1)
    assert sorted(path.name for path in (tmp_path / "step_000001").iterdir()) == ["weights"]
