"""What a disk can do to a run: fill up, lose a file, flip a bit. One clear error each time, and a way to go on."""

from __future__ import annotations

import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlflow.commands import cli
from rlflow.config.schema import RunConfig, load_config
from rlflow.errors import ConfigError, DamagedCheckpointError, StorageError
from rlflow.loop import train
from rlflow.run.directory import RunDirectory
from tests.flow.letters import DETERMINISTIC, SAVED_OFTEN, STEPS, letters_config, write_config
from tests.flow.test_resume import assert_equal_runs

OPTIONS = (*DETERMINISTIC, *SAVED_OFTEN)


@pytest.fixture
def run(whole: RunDirectory, tmp_path: Path) -> RunDirectory:
    """A copy of the undisturbed run, to be damaged."""
    shutil.copytree(whole.path, tmp_path / "letters")
    return RunDirectory.open(tmp_path / "letters")


def resumed(model: Path, run: RunDirectory, *options: str) -> RunConfig:
    return letters_config(model, run.path.parent, *OPTIONS, "run.resume=true", *options)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_saving_in_the_background_leaves_every_checkpoint_whole(whole: RunDirectory) -> None:
    assert whole.saved.steps() == list(range(1, STEPS + 1))
    assert [whole.saved.find_damage(step) for step in whole.saved.steps()] == [None] * STEPS


def test_damage_names_the_newest_whole_checkpoint_which_continues_to_the_same_end(
    model: Path, run: RunDirectory, whole: RunDirectory
) -> None:
    run.summary.unlink()  # the run did not end
    for step, name in ((STEPS, "__0_0.distcp"), (STEPS - 1, "trainer.json")):
        flip(run.saved.path(step) / "trainer" / name)
    (run.saved.path(STEPS - 2) / "state.json").unlink()
    good = STEPS - 3
    with pytest.raises(DamagedCheckpointError) as caught:
        train(resumed(model, run))
    assert "\n" not in str(caught.value) and "__0_0.distcp: damaged, its checksum is" in str(
        caught.value
    )
    assert str(caught.value).endswith(
        f"that of step {good}: continue with --resume run.resume_step={good}"
    )
    with pytest.raises(
        DamagedCheckpointError, match=rf"state\.json: missing.*run\.resume_step={good}"
    ):
        train(resumed(model, run, f"run.resume_step={STEPS - 2}"))
    assert train(resumed(model, run, f"run.resume_step={good}"))["steps"] == STEPS
    assert_equal_runs(run, whole, evaluations=False)
    assert [run.saved.find_damage(step) for step in run.saved.steps()] == [None] * STEPS
    assert len(list(run.checkpoints.glob("*.aside"))) == 3


def test_a_run_can_go_back_to_a_checkpoint_that_is_there(
    model: Path, run: RunDirectory, whole: RunDirectory
) -> None:
    with pytest.raises(ConfigError, match=r"run\.resume_step: 4 needs run\.resume"):
        train(letters_config(model, run.path.parent, *OPTIONS, "run.resume_step=4"))
    with pytest.raises(ConfigError, match=r"no checkpoint of step 77; there are: 1, 2,"):
        train(resumed(model, run, "run.resume_step=77"))
    left = [run.path / "evaluations/step_000099.jsonl", run.path / "trajectories/step_000099.jsonl"]
    for file in left:
        file.write_text("of a longer continuation")
    train(resumed(model, run, "run.resume_step=4"))
    assert not any(file.exists() for file in left)
    assert_equal_runs(run, whole, evaluations=False)
    assert load_config(run.config).run.resume_step is None  # the next start goes on from the newest


@pytest.mark.parametrize("asynchronous", [pytest.param("false", marks=pytest.mark.slow), "true"])
def test_a_file_size_limit_is_one_line_and_costs_no_checkpoint(
    asynchronous: str,
    model: Path,
    run: RunDirectory,
    whole: RunDirectory,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The process may not write a file as large as a checkpoint's."""
    limit = (run.saved.path(3) / "trainer" / "__0_0.distcp").stat().st_size // 2
    for step in range(4, STEPS + 1):
        shutil.rmtree(run.saved.path(step))
    options = (f"checkpoint.asynchronous={asynchronous}",)
    config = write_config(resumed(model, run, *options), tmp_path / "config.yaml")
    allowed, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    try:
        code = cli.main(["train", "--config", str(config)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (allowed, most))
    error = capsys.readouterr().err
    assert code == 2, error
    assert error.startswith("rlflow: StorageError: saving step 4: ") and error.count("\n") == 1
    assert "File too large" in error and error.rstrip().endswith("and continue with --resume")
    assert "the newest checkpoint is that of step 3" in error
    assert run.saved.steps() == [1, 2, 3] and not list(run.checkpoints.glob("*.partial"))
    train(resumed(model, run, *options))
    assert_equal_runs(run, whole, evaluations=False)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("asynchronous", ["false", pytest.param("true", marks=pytest.mark.slow)])
def test_a_full_disk_ends_a_run_with_its_newest_checkpoint_named_and_whole(
    asynchronous: str, model: Path, small_disk: Path, whole: RunDirectory
) -> None:
    options = (*OPTIONS, f"checkpoint.asynchronous={asynchronous}", "checkpoint.export=false")
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(1_700_000))
    with pytest.raises(
        StorageError, match=r"No space left on device.*newest checkpoint is that of step \d"
    ) as caught:
        train(letters_config(model, small_disk, *options))
    run = RunDirectory.open(small_disk / "letters")
    newest = run.saved.steps()[-1]
    assert f"step {newest}" in str(caught.value) and 1 <= newest < STEPS
    assert [run.saved.find_damage(step) for step in run.saved.steps()] == [None] * newest
    ballast.unlink()
    train(letters_config(model, small_disk, *options, "run.resume=true", "checkpoint.keep=1"))
    shutil.copytree(run.path, moved := small_disk.parent / "moved")
    shutil.copytree(
        whole.export, moved / "export"
    )  # not exported here; the metrics and episodes say enough
    assert_equal_runs(RunDirectory.open(moved), whole, evaluations=False)
