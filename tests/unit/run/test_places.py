"""Runs are resumed and evaluated from any folder, also after they were moved with their project."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from rlflow.commands.cli import main
from rlflow.config.schema import load_config
from rlflow.errors import CALLED_IN
from rlflow.report.sinks import read_metrics
from rlflow.run.places import enter_project, project_folder
from rlflow.storage.files import read_json
from tests.flow.letters import REFERENCE, write_letters_model
from tests.reference import ORACLE

CONFIG = """run: {{folder: {folder}, directory: "{directory}", name: first}}
model: {{path: model}}
data: {{train_split: train}}
environment: {{name: "game.py:Game", file: data/rows.jsonl}}
"""


def project(path: Path, directory: str = "runs/{name}") -> Path:
    """A project with a run; returns the run's config.yaml."""
    for name in ("game.py", "data/rows.jsonl", "model/config.json", "train/x"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).touch()
    run = path / directory.format(name="first")
    run.mkdir(parents=True)
    (run / "metrics.jsonl").touch()
    (run / "config.yaml").write_text(CONFIG.format(folder=path, directory=directory))
    return run / "config.yaml"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which is no project."""
    monkeypatch.setenv(CALLED_IN, "")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "elsewhere"


def test_paths_start_where_the_run_was_started(tmp_path: Path, elsewhere: Path) -> None:
    config = project(tmp_path / "mine")
    assert project_folder(config) == tmp_path / "mine"
    (elsewhere / "own.jsonl").touch()
    (elsewhere / "val").mkdir()
    overrides = ["environment.file=own.jsonl", "data.val_split=val", "run.steps=3", "x=no.file"]
    taken = enter_project(config, overrides, resume=True)
    assert taken == [f"environment.file='{elsewhere}/own.jsonl'", *overrides[1:]]
    assert Path.cwd() == tmp_path / "mine"


def test_a_project_that_was_moved_is_beside_its_run(tmp_path: Path, elsewhere: Path) -> None:
    project(tmp_path / "mine")
    shutil.move(tmp_path / "mine", tmp_path / "theirs")
    config = tmp_path / "theirs/runs/first/config.yaml"
    assert project_folder(config) == tmp_path / "theirs"
    assert enter_project(config, [], resume=True) == [] and Path.cwd() == tmp_path / "theirs"


def test_of_a_copy_the_files_beside_the_run_count_if_all_are_there(tmp_path: Path) -> None:
    project(tmp_path / "mine")
    shutil.copytree(tmp_path / "mine", tmp_path / "copy")
    config = tmp_path / "copy/runs/first/config.yaml"
    assert project_folder(config) == tmp_path / "copy"
    (tmp_path / "copy/game.py").unlink()
    assert project_folder(config) == tmp_path / "mine"


def test_a_run_that_was_moved_alone_is_resumed_where_it_is(tmp_path: Path, elsewhere: Path) -> None:
    config = project(tmp_path / "mine")
    moved = shutil.move(config.parent, tmp_path / "kept {1}")
    overrides = enter_project(Path(moved, "config.yaml"), ["run.steps=3"], resume=True)
    assert Path.cwd() == tmp_path / "mine"
    resumed = load_config(Path(moved, "config.yaml"), overrides)
    assert resumed.run.directory.format(name="x") == str(moved)
    os.chdir(elsewhere)
    renamed = ["run.name=second"]
    assert enter_project(Path(moved, "config.yaml"), renamed, resume=True) == renamed


def test_a_file_without_a_folder_starts_here_as_before(tmp_path: Path, elsewhere: Path) -> None:
    config = tmp_path / "mine.yaml"
    for text in ("run: {steps: 3}", "run: 7", "- 1", "run: {folder: 7}", "run: {folder: /nowhere}"):
        config.write_text(text)
        assert enter_project(config, ["a.b=c"], resume=True) == ["a.b=c"]
    assert Path.cwd() == elsewhere


GAME = """
from tests.flow.letters import Letters

class Game(Letters):
    pass
"""


@pytest.mark.slow
def test_train_and_eval_find_everything_from_any_folder_and_after_a_move(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert REFERENCE
    home = tmp_path / "mine"
    write_letters_model(home / "model")
    (home / "game.py").write_text(GAME)
    monkeypatch.chdir(home)
    options = ["rollout.prompts_per_step=4", "rollout.samples_per_prompt=2", "metrics.picture=false",
               "evaluation.questions=4", "evaluation.final_questions=4", "metrics.progress=none",
               "rollout.max_turns=2", "rollout.max_response_tokens=1", "rollout.max_total_tokens=16",
               f"trainer.backend={ORACLE}"]  # fmt: skip
    start = ["train", "--model", "model", "--env", "game.py:Game", *options]
    assert main([*start, "run.steps=1"]) == 0

    monkeypatch.chdir(elsewhere)
    run = home / "runs" / "run"
    resume = ["train", "--config", str(run / "config.yaml"), "--resume"]
    assert main([*resume, "run.steps=2"]) == 0 and Path.cwd() == elsewhere
    assert main(["eval", "--model", str(run / "export"), "--questions", "4"]) == 0
    summary = read_json(elsewhere / "runs" / "eval-run" / "summary.json")
    assert summary["eval/questions"] == 4

    shutil.move(home, tmp_path / "theirs")
    run = tmp_path / "theirs" / "runs" / "run"
    resume = ["train", "--config", str(run / "config.yaml"), "--resume"]
    assert main([*resume, "run.steps=3"]) == 0
    assert main(["eval", "--model", str(run / "export"), "--questions", "4"]) == 0
    steps = [record["step"] for record in read_metrics(run / "metrics.jsonl")]
    assert max(steps) == 3 and not home.exists()
    assert main([*resume, "run.steps=4", "environment.name=game.py:Other"]) == 2
