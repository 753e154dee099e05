"""Run directories: nothing is lost by accident, nothing half written is taken for whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlflow.config.schema import RunConfig
from rlflow.errors import CheckpointError, ConfigError
from rlflow.report.records import read_trajectories, write_trajectories
from rlflow.run import directory
from rlflow.run.directory import RunDirectory, run_path
from rlflow.run.resume import finished_summary
from rlflow.storage.files import read_json, write_json, write_text
from rlflow.types import Group, Segment, StopReason, Task, Trajectory, Turn

ROOT = Path(__file__).resolve().parents[3]


def make_run(path: Path, steps: tuple[int, ...] = ()) -> RunDirectory:
    run = RunDirectory.create(path)
    write_text(run.config, "run: {}\n")
    for step in steps:
        (run.saved.begin(step) / "weights").write_text(f"weights {step}")
        run.saved.commit(step)
    return run


def test_an_existing_run_needs_resume_overwrite_or_another_name(tmp_path: Path) -> None:
    make_run(tmp_path / "run", (1,)).close()
    (tmp_path / "run" / "view.html").write_text("of the old run")
    with pytest.raises(ConfigError, match=r"already holds a run.*--resume.*--overwrite.*run\.name"):
        RunDirectory.create(tmp_path / "run")
    with RunDirectory.create(tmp_path / "run", resume=True) as run:
        assert run.saved.latest() == (1, tmp_path / "run/checkpoints/step_000001")
    with RunDirectory.create(tmp_path / "run", overwrite=True) as run:
        assert run.saved.latest() is None and not run.config.exists()
        assert not (run.path / "view.html").exists()


def test_going_back_drops_the_episodes_of_the_other_continuation(tmp_path: Path) -> None:
    names = (
        "trajectories/step_000003.jsonl",
        "tokens/step_000003.npz",
        "evaluations/step_000003.jsonl",
    )
    with make_run(tmp_path / "run") as run:
        for name in names:
            for other in (name, name.replace("3", "4"), f"{name.partition('/')[0]}/notes.txt"):
                write_text(run.path / other, "x")
        run.drop_after(3)
        left = {
            str(file.relative_to(run.path))
            for name in names
            for file in (run.path / name).parent.iterdir()
        }
    assert left == {*names, *(f"{name.partition('/')[0]}/notes.txt" for name in names)}


def test_overwrite_never_touches_a_directory_that_is_no_run_nor_files_that_are_not_its_own(
    tmp_path: Path,
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years")
    for flags in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(ConfigError):
            RunDirectory.create(tmp_path / "home", **flags)
    (tmp_path / "home" / "config.yaml").write_text("tool: {}\n")
    for flags in ({"overwrite": True}, {"resume": True}):
        with pytest.raises(ConfigError, match="files that are not of a run"):
            RunDirectory.create(tmp_path / "home", **flags)
    make_run(tmp_path / "run").close()
    (tmp_path / "run" / "notes.md").write_text("mine")
    RunDirectory.create(tmp_path / "run", overwrite=True).close()
    assert (tmp_path / "run" / "notes.md").exists() and (tmp_path / "home" / "thesis.tex").exists()


@pytest.mark.parametrize("removed", range(1, len(directory.LAYOUT)))
def test_a_kill_while_a_run_is_thrown_away_leaves_a_run_that_did_not_finish(
    removed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_run(tmp_path / "run", (1,)) as run:
        for name in directory.LAYOUT:
            if not (run.path / name).exists():
                write_text(run.path / name, "{}")
    with monkeypatch.context() as killed:
        killed.setattr(directory, "LAYOUT", directory.LAYOUT[:removed])
        RunDirectory.create(tmp_path / "run", overwrite=True).close()
    assert not run.summary.exists()
    for flags in ({"resume": True}, {"overwrite": True}):
        RunDirectory.create(tmp_path / "run", **flags).close()


@pytest.mark.parametrize("pattern", ["{name.x}", "{name[x]}", "{0}", "{"])
def test_placeholders_that_are_none_are_one_line(pattern: str) -> None:
    config = RunConfig()
    config.run.directory = pattern
    with pytest.raises(ConfigError, match="expected a path with no placeholder"):
        run_path(config.run)


def test_a_summary_that_is_none_leaves_a_run_to_be_resumed(tmp_path: Path) -> None:
    config = RunConfig()
    config.run.directory = str(tmp_path / "run")
    with make_run(tmp_path / "run", (1,)) as run:
        write_text(run.summary, "[]")
    assert finished_summary(config.run) is None


def test_resume_and_overwrite_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="both on"):
        RunDirectory.create(tmp_path / "run", resume=True, overwrite=True)


TWO_TRIES = """
import sys
from rlflow.errors import ConfigError
from rlflow.run.directory import RunDirectory
for _ in range(2):
    try:
        RunDirectory.create(sys.argv[1], resume=True).close()
        print("open", flush=True)
    except ConfigError as error:
        print(error, flush=True)
    sys.stdin.readline()
"""


def test_another_process_cannot_write_into_an_open_run(tmp_path: Path) -> None:
    with make_run(tmp_path / "run"):
        other = subprocess.Popen([sys.executable, "-c", TWO_TRIES, str(tmp_path / "run")], cwd=ROOT, text=True,
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)  # fmt: skip
        assert other.stdout is not None and other.stdin is not None
        assert f"run.directory: process {os.getpid()} of host " in other.stdout.readline()
    out, _ = other.communicate("\n\n", timeout=30)
    assert out.strip() == "open"


def test_reading_a_directory_without_a_run_lists_the_runs_in_it(tmp_path: Path) -> None:
    make_run(tmp_path / "first").close()
    with pytest.raises(ConfigError, match="Runs in it: first"):
        RunDirectory.open(tmp_path)


def test_trajectories_read_back_with_exact_token_counts(tmp_path: Path) -> None:
    mask = torch.tensor([0, 0, 0, 1, 1, 0, 0, 1, 1, 1], dtype=torch.bool)
    segment = Segment(torch.arange(10), mask, None, torch.full((10,), -1))
    turns = [
        Turn(0, 3, 5, 0.0, 0.1, "<search>é</search>", "<information/>"),
        Turn(0, 7, 10, 1.0, 0.1, "done", ""),
    ]
    whole = Trajectory(
        "t-1",
        "0:t-1",
        [segment],
        turns,
        1.0,
        StopReason.TERMINATED,
        {"exact_match": 1.0},
        prompt="Q?",
    )
    aborted = Trajectory("t-1", "0:t-1", [], [], 0.0, StopReason.ABORTED, error="search is down")
    group = Group("0:t-1", Task("t-1", "Q?", ["a", "b"]), [whole, aborted])
    write_trajectories(tmp_path / "x" / "t.jsonl", [group])
    first, second = read_trajectories(tmp_path / "x" / "t.jsonl")
    assert (first["prompt_tokens"], first["response_tokens"], first["observation_tokens"]) == (
        3,
        5,
        2,
    )
    assert [turn["tokens"] for turn in first["turns"]] == [2, 3] and first["turns"][0][
        "response"
    ] == "<search>é</search>"
    assert (first["answer"], first["stop"], second["stop"], second["error"]) == (
        ["a", "b"],
        "terminated",
        "aborted",
        "search is down",
    )


def test_json_holds_only_what_json_can_say_and_damage_is_named(tmp_path: Path) -> None:
    write_json(
        tmp_path / "a.json",
        {"nan": float("nan"), "tensor": torch.tensor([1, 2]), "path": tmp_path, "set": {1}},
    )
    assert read_json(tmp_path / "a.json") == {
        "nan": None,
        "tensor": [1, 2],
        "path": str(tmp_path),
        "set": [1],
    }
    (tmp_path / "b.json").write_text('{"a": ')
    with pytest.raises(CheckpointError, match=r"b\.json: damaged"):
        read_json(tmp_path / "b.json")
    with pytest.raises(CheckpointError, match=r"c\.json: no such file"):
        read_json(tmp_path / "c.json")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs /proc")
def test_a_place_that_takes_no_directory_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match=r"run\.directory: /proc/x cannot be written"):
        RunDirectory.check("/proc/x")


def test_a_mistyped_name_is_not_resumed_as_a_new_run(tmp_path: Path) -> None:
    make_run(tmp_path / "my-demo", (1,)).close()
    for open_ in (RunDirectory.check, RunDirectory.create):
        with pytest.raises(
            ConfigError,
            match=r"no run in .*my-deom \(beside it: my-demo\)\. Did you mean .my-demo.\? .*mkdir",
        ):
            open_(tmp_path / "my-deom", resume=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["my-demo"]
    (tmp_path / "my-deom").mkdir()  # what a job that is always started with --resume does first
    RunDirectory.create(tmp_path / "my-deom", resume=True).close()
