"""A run's checkpoints: whole or not there; damage is found; what is retired is never the newest good one."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlflow.errors import CheckpointError, ConfigError, DamagedCheckpointError
from rlflow.run.checkpoints import STATE, TRAINER, Checkpoints, RunState, read_state
from rlflow.storage.files import write_json
from rlflow.storage.integrity import TRAINER_MANIFEST, fingerprint, write_manifest

ROOT = Path(__file__).resolve().parents[3]


def write(checkpoints: Checkpoints, step: int, keep: int | None = None) -> None:
    """A checkpoint as a trainer and a run would write it."""
    path = checkpoints.begin(step)
    (path / TRAINER).mkdir()
    (path / TRAINER / "weights").write_text(f"weights {step}")
    files = {"weights": fingerprint(path / TRAINER / "weights")}
    write_manifest(path / TRAINER / TRAINER_MANIFEST, {"step": step}, files)
    RunState({"step": step}).write(path)
    checkpoints.commit(step, keep)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints")


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.folder.iterdir())


def test_the_newest_checkpoints_are_kept(checkpoints: Checkpoints) -> None:
    for step in (5, 10, 15, 1000000):
        write(checkpoints, step, keep=2)
    assert checkpoints.steps() == [15, 1000000]
    assert names(checkpoints) == ["step_000015", "step_1000000"]
    assert read_state(checkpoints.path(15)) == {"step": 15}


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_whatever_stands_there_the_checkpoint_just_written_and_newer_ones_stay(
    keep: int, checkpoints: Checkpoints
) -> None:
    draw = random.Random(keep)
    for _ in range(10):
        before, step = checkpoints.steps(), draw.randrange(1, 30)
        write(checkpoints, step, keep)
        older = [other for other in before if other < step][::-1][: keep - 1]
        newer = [other for other in before if other > step]
        assert checkpoints.steps() == sorted([*older, step, *newer])
        assert checkpoints.find_damage(step) is None


def test_damage_to_a_further_model_of_a_checkpoint_is_found(checkpoints: Checkpoints) -> None:
    write(checkpoints, 1)
    further = checkpoints.path(1) / TRAINER / "critic"
    further.mkdir()
    (further / "weights").write_text("values")
    write_manifest(
        further / TRAINER_MANIFEST, {"step": 7}, {"weights": fingerprint(further / "weights")}
    )
    assert checkpoints.find_damage(1) is None
    (further / "weights").write_text("velues")
    damage = checkpoints.find_damage(1)
    assert damage is not None and str(further / "weights") in damage


def test_a_save_that_ends_early_leaves_the_last_good_checkpoint(checkpoints: Checkpoints) -> None:
    write(checkpoints, 1)
    (checkpoints.folder / "mine.partial").mkdir()
    (checkpoints.begin(2) / STATE).write_text("{}")
    assert checkpoints.steps() == [1] and checkpoints.find_damage(1) is None
    assert list(checkpoints.begin(2).iterdir()) == []  # what was left is not in it
    checkpoints.clean()
    assert names(checkpoints) == ["mine.partial", "step_000001"]


def test_saving_a_step_again_replaces_it(checkpoints: Checkpoints) -> None:
    write(checkpoints, 1)
    (checkpoints.begin(1) / "weights").write_text("new")
    checkpoints.commit(1, keep=1)
    assert (checkpoints.path(1) / "weights").read_text() == "new"
    assert names(checkpoints) == ["step_000001"]


def test_a_kill_while_replacing_loses_nothing(checkpoints: Checkpoints) -> None:
    write(checkpoints, 1)
    os.replace(
        checkpoints.path(1), checkpoints.folder / "step_000001.1.2.replaced"
    )  # the state between the two renames
    checkpoints.clean()
    assert checkpoints.steps() == [1] and checkpoints.find_damage(1) is None


def test_every_kind_of_damage_is_found_and_the_newest_whole_checkpoint_named(
    checkpoints: Checkpoints,
) -> None:
    for step in (1, 2, 3):
        write(checkpoints, step)
    assert [checkpoints.find_damage(step) for step in (1, 2, 3)] == [None] * 3
    files = [
        path.relative_to(checkpoints.path(2))
        for path in checkpoints.path(2).rglob("*")
        if path.is_file()
    ]
    assert len(files) == 3
    for file in files:
        path = checkpoints.path(2) / file
        content = path.read_bytes()
        half = len(content) // 2
        for damaged in (
            content[:half],
            b"",
            bytes([*content[:half], content[half] ^ 4, *content[half + 1 :]]),
            None,
        ):
            path.write_bytes(damaged) if damaged is not None else path.unlink()
            assert str(path) in (checkpoints.find_damage(2) or "")
            assert "of step 1: continue with --resume run.resume_step=1" in checkpoints.advice(3)
        path.write_bytes(content)
    assert "that of step 2" in checkpoints.advice(3)
    assert "No earlier checkpoint is whole" in checkpoints.advice(1)
    shutil.rmtree(checkpoints.path(2) / TRAINER)
    assert "trainer" in (checkpoints.find_damage(2) or "")


@pytest.mark.parametrize("part", ["", STATE, TRAINER])
def test_parts_of_another_step_than_the_directorys_are_found(
    part: str, checkpoints: Checkpoints
) -> None:
    """Two whole checkpoints, or parts of them, were exchanged by hand: every checksum is right."""
    for step in (1, 2, 3):
        write(checkpoints, step)
    first, second, aside = (
        checkpoints.path(2) / part,
        checkpoints.path(3) / part,
        checkpoints.folder / "aside",
    )
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    words = r"step_000003.*: expected the checkpoint of step 3, .* found that of step 2: directories or files were exchanged"
    with pytest.raises(DamagedCheckpointError, match=words):
        checkpoints.read_state(3)
    assert "exchanged" in (
        checkpoints.find_damage(2) or ""
    ) and "that of step 1" in checkpoints.advice(3)


def test_a_checkpoint_without_a_checksum_is_not_trusted(checkpoints: Checkpoints) -> None:
    write(checkpoints, 1)
    write_json(checkpoints.path(1) / STATE, {"step": 1})
    with pytest.raises(DamagedCheckpointError, match="carries no checksum"):
        read_state(checkpoints.path(1))


def test_going_back_sets_newer_checkpoints_aside_and_nothing_mistakes_them(
    checkpoints: Checkpoints,
) -> None:
    for step in (1, 2, 3):
        write(checkpoints, step)
    assert checkpoints.choose(None) == (3, checkpoints.path(3))
    assert checkpoints.choose(1) == (1, checkpoints.path(1))
    with pytest.raises(ConfigError, match=r"no checkpoint of step 7; there are: 1, 2, 3\."):
        checkpoints.choose(7)
    assert [path.name for path in checkpoints.set_aside_after(1)] == [
        "step_000002.aside",
        "step_000003.aside",
    ]
    write(checkpoints, 2, keep=1)
    assert checkpoints.steps() == [2]
    checkpoints.set_aside_after(1)
    assert names(checkpoints) == ["step_000002.2.aside", "step_000002.aside", "step_000003.aside"]


def test_what_was_converted_goes_with_its_checkpoint(checkpoints: Checkpoints) -> None:
    for step, name in ((1, "manifest.json"), (2, "mine.txt")):
        write(checkpoints, step)
        write_json(checkpoints.folder / f"step_{step:06d}.hf" / name, {})
    write(checkpoints, 3, keep=1)
    assert names(checkpoints) == ["step_000002.hf", "step_000003"], "what somebody else made stays"


def test_a_folder_without_checkpoints_has_none(checkpoints: Checkpoints) -> None:
    assert (
        checkpoints.steps() == []
        and checkpoints.latest() is None
        and checkpoints.choose(None) is None
    )
    with pytest.raises(ConfigError, match="there are: none"):
        checkpoints.choose(1)
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        read_state(checkpoints.path(1))


KILLED = """
import os, signal, sys, time
from pathlib import Path
from rlflow.run.checkpoints import Checkpoints

checkpoints = Checkpoints(Path(sys.argv[1]))

def save_forever():
    checkpoints.clean()
    step = (checkpoints.latest() or (0, None))[0]
    while True:
        step += 1
        path = checkpoints.begin(step)
        for name in "abcdefgh":
            (path / name).write_text(str(step) * 2000)
        checkpoints.commit(step, keep=2)

reached = 0
for attempt in range(12):
    child = os.fork()
    if child == 0:
        save_forever()
    while reached == 0 and checkpoints.latest() is None:
        time.sleep(0.005)
    time.sleep(0.02 + 0.0171 * attempt)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    step, path = checkpoints.latest()
    assert step >= reached, (step, reached)
    assert all((path / name).read_text() == str(step) * 2000 for name in "abcdefgh"), path
    reached = step
print(reached)
"""


def test_kills_at_many_moments_leave_whole_checkpoints(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "checkpoints")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 3


def test_the_state_with_the_configuration_in_it_is_for_its_user_alone(tmp_path: Path) -> None:
    RunState({"step": 1, "config": {}}).write(tmp_path)
    assert (tmp_path / STATE).stat().st_mode & 0o777 == 0o600
