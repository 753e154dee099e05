"""A run that was stopped, by whatever means, goes on as if it had never been: bit for bit in the deterministic mode."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
import torch

from rlflow.commands import cli
from rlflow.errors import CheckpointError, ConfigError
from rlflow.loop import train
from rlflow.models.huggingface import WeightFiles
from rlflow.report.records import read_trajectories
from rlflow.report.sinks import read_metrics
from rlflow.run.directory import RunDirectory
from rlflow.storage.files import read_json
from tests.flow.letters import (
    DETERMINISTIC,
    STEPS,
    letters_config,
    write_config,
    write_letters_model,
)

ROOT = Path(__file__).resolve().parents[2]


def assert_equal_runs(run: RunDirectory, whole: RunDirectory, *, evaluations: bool = True) -> None:
    """Weights bit for bit; every metric but times and memory; every episode that was written."""
    ours, theirs = WeightFiles(run.export), WeightFiles(whole.export)
    assert set(ours) == set(theirs) and all(
        torch.equal(ours[name], theirs[name]) for name in theirs
    )
    timeless = [
        [
            {
                name: value
                for name, value in record.items()
                if not name.startswith(("time", "speed", "memory"))
            }
            for record in records
        ]
        for records in (read_metrics(run.metrics), read_metrics(whole.metrics))
    ]
    if not evaluations:
        timeless = [
            [
                {name: value for name, value in one.items() if not name.startswith("eval/")}
                for one in records
                if one["step"]
            ]
            for records in timeless
        ]
    assert timeless[0] == timeless[1]
    for step in range(1, STEPS + 1):
        assert episodes(run, step) == episodes(whole, step)


def episodes(run: RunDirectory, step: int) -> list[dict]:
    records = read_trajectories(run.trajectories(step))
    for turn in (turn for record in records for turn in record["turns"]):
        del turn["duration_s"]
    return records


# ---------------------------------------------------------------- in one process


@pytest.mark.parametrize("first", [pytest.param(4, marks=pytest.mark.slow), 5])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    first: int, model: Path, whole: RunDirectory, tmp_path: Path
) -> None:
    """Stopped after 4 steps, at a checkpoint, or after 5, between two."""
    train(letters_config(model, tmp_path, *DETERMINISTIC, f"run.steps={first}"))
    summary = train(letters_config(model, tmp_path, *DETERMINISTIC, "run.resume=true"))
    assert summary["status"] == "finished" and summary["steps"] == STEPS
    # The shorter run ended with an evaluation of its own, so only the training is compared.
    assert_equal_runs(RunDirectory.open(tmp_path / "letters"), whole, evaluations=False)


@pytest.mark.slow
def test_the_deterministic_mode_repeats_a_run_bit_for_bit(
    model: Path, whole: RunDirectory, tmp_path: Path
) -> None:
    train(letters_config(model, tmp_path, *DETERMINISTIC))
    assert_equal_runs(RunDirectory.open(tmp_path / "letters"), whole)


def test_a_finished_run_is_left_alone(
    model: Path, whole: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    before = {
        path: (path.stat().st_mtime_ns, path.stat().st_size)
        for path in whole.path.rglob("*")
        if path.is_file()
    }
    summary = train(letters_config(model, whole.path.parent, *DETERMINISTIC, "run.resume=true"))
    assert (
        summary["steps"] == STEPS
        and "all 9 steps are done" in caplog.text
        and "run.steps" in caplog.text
    )
    assert {
        path: (path.stat().st_mtime_ns, path.stat().st_size)
        for path in whole.path.rglob("*")
        if path.is_file()
    } == before


def test_a_finished_run_goes_on_with_more_steps(model: Path, tmp_path: Path) -> None:
    few = ("metrics.picture=false", "checkpoint.every_steps=0", "checkpoint.export=false")
    train(letters_config(model, tmp_path, "run.steps=2", *few))
    summary = train(letters_config(model, tmp_path, "run.steps=3", "run.resume=true", *few))
    run = RunDirectory.open(tmp_path / "letters")
    assert summary["steps"] == 3 and run.saved.steps() == [2, 3]
    records = read_metrics(run.metrics)
    assert [record["step"] for record in records] == [0, 1, 2, 3] and "eval/exact_match" in records[
        -1
    ]


def test_resuming_where_nothing_is_starts_at_the_beginning(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "letters").mkdir()
    options = ("run.steps=1", "run.resume=true", "checkpoint.export=false", "metrics.picture=false")
    assert train(letters_config(model, tmp_path, *options))["steps"] == 1
    assert "no checkpoint" in caplog.text and "starts at step 0" in caplog.text


def test_what_was_measured_without_a_checkpoint_is_measured_anew(
    model: Path, tmp_path: Path
) -> None:
    options = (
        "run.steps=2",
        "checkpoint.every_steps=0",
        "checkpoint.export=false",
        "metrics.picture=false",
    )
    train(letters_config(model, tmp_path, *options))
    run = RunDirectory.open(tmp_path / "letters")
    lost = run.saved.path(2).rename(run.path / "lost")  # as if killed before the only checkpoint
    train(letters_config(model, tmp_path, *options, "run.resume=true"))
    assert [line.split('"step": ')[1][0] for line in run.metrics.read_text().splitlines()] == [
        "0",
        "1",
        "2",
        "2",
    ]
    assert (lost / "state.json").is_file()


def test_an_existing_run_is_not_overwritten(
    model: Path, whole: RunDirectory, tmp_path: Path
) -> None:
    shutil.copytree(whole.path, tmp_path / "letters")
    with pytest.raises(
        ConfigError, match=r"already holds a run: .*--resume.*--overwrite.*run\.name"
    ):
        train(letters_config(model, tmp_path, *DETERMINISTIC))


def test_overwriting_begins_anew_but_only_once_everything_is_found_in_order(
    model: Path, tmp_path: Path
) -> None:
    options = (
        "run.steps=1",
        "checkpoint.export=false",
        "metrics.picture=false",
        "run.overwrite=true",
    )
    train(letters_config(model, tmp_path, *options))
    run = RunDirectory.open(tmp_path / "letters")
    before = run.metrics.read_text()
    with pytest.raises(ConfigError, match="no module"):
        train(
            letters_config(
                model, tmp_path, *options, "environment={name: 'no.such.module:Environment'}"
            )
        )
    assert run.metrics.read_text() == before and run.saved.steps() == [1]
    train(letters_config(model, tmp_path, *options, "run.seed=5"))
    assert run.metrics.read_text() != before and "seed: 5" in run.config.read_text()


def test_another_model_cannot_take_over_a_run(model: Path, tmp_path: Path) -> None:
    options = ("run.steps=1", "checkpoint.export=false", "metrics.picture=false")
    train(letters_config(model, tmp_path, *options))
    run = RunDirectory.open(tmp_path / "letters")
    noted = run.config.read_text()
    other = write_letters_model(tmp_path / "other", hidden_size=48)
    with pytest.raises(CheckpointError, match="belongs to another model"):
        train(letters_config(other, tmp_path, *options, "run.steps=2", "run.resume=true"))
    assert run.saved.steps() == [1] and run.config.read_text() == noted


# ---------------------------------------------------------------- real processes and signals


def start(config: Path, *arguments: str) -> subprocess.Popen[str]:
    """`rlflow train` as a user starts it, in a session of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "rlflow", "train", "--config", str(config), *arguments],
                            cwd=config.parent, env=environment, start_new_session=True, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip


def wait_for(
    condition: Callable[[], bool], process: subprocess.Popen[str], limit_s: float = 120.0
) -> None:
    """Returns when the condition holds; fails if the process ends before that."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "the run did not get there in time"
        time.sleep(0.01)


def reached(run: RunDirectory, step: int) -> Callable[[], bool]:
    return lambda: (
        run.metrics.is_file()
        and any(f'{{"step": {step},' in line for line in run.metrics.read_text().splitlines())
    )


def finish(process: subprocess.Popen[str], limit_s: float = 120.0) -> str:
    """What it wrote on stderr, when it has ended; nothing of its session may live on."""
    try:
        _, err = process.communicate(timeout=limit_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    left = [
        one
        for one in psutil.process_iter()
        if one.pid != process.pid and _session(one.pid) == process.pid
    ]
    _, left = psutil.wait_procs(left, timeout=10)
    assert [one for one in left if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []
    return err


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return 0


def killed_then_resumed(
    config: Path, run: RunDirectory, kill_when: Callable[[], bool]
) -> tuple[int, int]:
    """(steps measured at the kill, step resumed from); the run is finished afterwards, in this process."""
    from rlflow.config.schema import load_config

    process = start(config)
    wait_for(kill_when, process)
    os.killpg(process.pid, signal.SIGKILL)
    assert finish(process) is not None and process.returncode == -signal.SIGKILL
    measured = (
        max((int(record["step"]) for record in read_metrics(run.metrics)), default=0)
        if run.metrics.is_file()
        else 0
    )
    latest = run.saved.latest()
    train(load_config(config, ["run.resume=true"]))
    return measured, latest[0] if latest else 0


@pytest.fixture
def disturbed(model: Path, tmp_path: Path) -> tuple[Path, RunDirectory]:
    """(configuration file, its run directory) of the deterministic run."""
    config = letters_config(model, tmp_path, *DETERMINISTIC)
    return write_config(config, tmp_path / "config.yaml"), RunDirectory(tmp_path / "letters")


def test_a_killed_run_resumes_from_its_last_checkpoint_and_ends_with_the_same_weights(
    disturbed: tuple[Path, RunDirectory], whole: RunDirectory
) -> None:
    config, run = disturbed
    measured, resumed = killed_then_resumed(config, run, reached(run, 5))
    assert resumed >= 4 and measured - resumed <= 2  # a checkpoint every other step
    assert_equal_runs(run, whole)


def test_ctrl_c_ends_a_run_cleanly_and_it_resumes(
    disturbed: tuple[Path, RunDirectory],
    whole: RunDirectory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command in this process; the test below has processes of their own."""
    from rlflow.config.schema import load_config

    config, run = disturbed
    has_ended = threading.Event()

    def interrupt() -> None:
        while not reached(run, 1)():
            if has_ended.wait(0.01):
                return
        os.kill(os.getpid(), signal.SIGINT)

    before = psutil.Process().children(recursive=True)
    watcher = threading.Thread(target=interrupt)
    watcher.start()
    try:
        code = cli.main(["train", "--config", str(config)])
    finally:
        has_ended.set()
        watcher.join()
    err = capsys.readouterr().err
    assert code == 130, err
    assert "SIGINT: finishing this step" in err and "Traceback" not in err
    assert psutil.Process().children(recursive=True) == before
    summary = read_json(run.summary)
    assert summary["status"] == "interrupted by SIGINT" and 1 <= summary["steps"] < STEPS
    assert run.saved.steps()[-1] == summary["steps"] and not run.export.exists()
    assert train(load_config(config, ["run.resume=true"]))["status"] == "finished"
    assert_equal_runs(run, whole, evaluations=False)


@pytest.mark.slow
def test_signals_end_a_run_cleanly_and_it_resumes(
    disturbed: tuple[Path, RunDirectory], whole: RunDirectory
) -> None:
    from rlflow.config.schema import load_config

    config, run = disturbed
    step = 1
    interrupted, terminated = (signal.SIGINT, 130, ()), (signal.SIGTERM, 143, ("--resume",))
    for sent, code, words in (interrupted, terminated):
        process = start(config, *words)
        wait_for(reached(run, step), process)
        process.send_signal(sent)
        err = finish(process)
        assert process.returncode == code, err
        assert f"{sent.name}: finishing this step" in err and "Traceback" not in err
        summary = read_json(run.summary)
        assert (
            summary["status"] == f"interrupted by {sent.name}" and step <= summary["steps"] < STEPS
        )
        assert run.saved.steps()[-1] == summary["steps"] and not run.export.exists()
        step = summary["steps"] + 1
    assert train(load_config(config, ["run.resume=true"]))["status"] == "finished"
    assert_equal_runs(run, whole, evaluations=False)


@pytest.mark.slow
@pytest.mark.parametrize("order", [("--resume",), ()])
def test_a_second_process_cannot_write_into_a_running_run(
    order: Sequence[str], disturbed: tuple[Path, RunDirectory]
) -> None:
    config, run = disturbed
    first = start(config, "run.steps=100000")
    wait_for(reached(run, 1), first)
    second = start(config, *order)
    err = finish(second)
    assert second.returncode == 2 and len(err.splitlines()) == 1
    assert "is writing to" in err or "already holds a run" in err
    first.send_signal(signal.SIGTERM)
    finish(first)
    assert first.returncode == 143
