"""Asynchronous runs under what befalls them from outside: an outage of their tools, a suspended job, a stolen directory."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from rlflow.errors import DirectoryLostError, RolloutError
from rlflow.loop import train, training_step
from rlflow.report.records import read_trajectories
from rlflow.run.directory import RunDirectory
from tests.flow.fallible import REFERENCE, THEIRS, take_directory, written
from tests.flow.letters import letters_config, write_config, write_letters_model
from tests.flow.test_asynchronous import AHEAD, assert_trained_exactly_once
from tests.flow.test_resume import finish, reached, start, wait_for

STEPS = 7
SHORT = (*AHEAD, f"run.steps={STEPS}", "evaluation.at_start=false", "evaluation.every_steps=0", "checkpoint.every_steps=2",
         "evaluation.final_questions=4")  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_letters_model(tmp_path_factory.mktemp("model") / "letters")


def at_step(monkeypatch: pytest.MonkeyPatch, wanted: int, happens: Any) -> None:
    """Calls the function before the training of a step, counted from 0."""

    def training_step_and_more(step: int, *rest: Any) -> dict[str, float]:
        if step == wanted:
            happens()
        return training_step(step, *rest)

    monkeypatch.setattr("rlflow.loop.training_step", training_step_and_more)


def usable(run: RunDirectory) -> bool:
    records = [
        one for step in range(1, STEPS + 1) for one in read_trajectories(run.trajectories(step))
    ]
    return all(one["stop"] != "aborted" for one in records)


def test_a_run_that_an_outage_of_its_tools_ended_goes_on_once_they_are_back(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    options = (*SHORT, f"environment={{name: '{REFERENCE}', out: '{out}'}}")
    with monkeypatch.context() as patch:
        at_step(patch, 3, out.touch)
        with pytest.raises(RolloutError, match=r"episodes were aborted.*the tool is out"):
            train(letters_config(model, tmp_path, *options))
    with pytest.raises(RolloutError, match="the tool is out"):  # still
        train(letters_config(model, tmp_path, *options, "run.resume=true"))
    out.unlink()
    train(letters_config(model, tmp_path, *options, "run.resume=true"))
    run = RunDirectory.open(tmp_path / "letters")
    assert_trained_exactly_once(run, STEPS)
    assert usable(run)


@pytest.mark.slow
def test_a_job_that_was_suspended_for_longer_than_an_episode_may_last_goes_on(
    model: Path, tmp_path: Path
) -> None:
    faults = "rollout.faults={call_s: 2, episode_s: 4, max_aborted_share: 0}"
    environment = f"environment={{name: '{REFERENCE}', takes_s: 0.3}}"
    config = write_config(
        letters_config(model, tmp_path, *SHORT, environment, faults), tmp_path / "config.yaml"
    )
    run, process = RunDirectory(tmp_path / "letters"), start(config)
    wait_for(reached(run, 2), process, 240.0)
    for _ in range(2):
        os.killpg(process.pid, signal.SIGSTOP)
        time.sleep(7.0)
        os.killpg(process.pid, signal.SIGCONT)
        time.sleep(0.5)
    said = finish(process)
    assert process.returncode == 0, said
    assert_trained_exactly_once(run, STEPS)
    assert usable(run)


@pytest.mark.parametrize("moment", ["in an episode", "in training"])
def test_a_run_whose_directory_another_one_took_ends_and_writes_nothing_more(
    moment: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, before = RunDirectory(tmp_path / "letters"), {}

    def steal() -> None:
        before.update(written(run.path))
        take_directory(run.path)

    options = ["checkpoint.every_steps=1", "checkpoint.asynchronous=true"]
    if moment == "in training":
        at_step(monkeypatch, 3, steal)
    else:
        options.append(f"environment={{name: '{REFERENCE}', steals: '{run.path}', takes_s: 0.02}}")
    with pytest.raises(
        DirectoryLostError,
        match=r"written by process 1 of host elsewhere now .* ends and writes nothing",
    ):
        train(letters_config(model, tmp_path, *SHORT, *options))
    assert (run.path / "run.lock").read_text() == THEIRS
    expected = before or json.loads(Path(f"{run.path}.json").read_text())
    assert written(run.path) == expected
