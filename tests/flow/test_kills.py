"""kill -9 and SIGTERM at random moments of real `rlflow train` processes: what was saved stays, and no process does."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from rlflow.config.schema import RunConfig, load_config
from rlflow.loop import train
from rlflow.models.huggingface import WeightFiles
from rlflow.report.sinks import read_metrics
from rlflow.run.directory import RunDirectory
from rlflow.storage.files import read_json
from tests.flow.letters import DETERMINISTIC, LEARNING, letters_config, write_config
from tests.flow.test_resume import finish, reached, start, wait_for
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LIMIT_S = 240.0  # for Ray to start on a busy machine

TP2_PP2 = ("cluster.ranks=4", "trainer.tensor_parallel=2", "trainer.pipeline_parallel=2")
TP2_DP2 = ("cluster.ranks=4", "trainer.tensor_parallel=2", "trainer.distributed_optimizer=true")


def busy_config(model: Path, runs: Path, *options: str) -> RunConfig:
    """A run whose steps take long enough to be killed in."""
    return letters_config(model, runs, *LEARNING, *options)


def kill_at_a_moment(
    process: subprocess.Popen[str], run: RunDirectory, draw: random.Random
) -> bool:
    """Kills the run's whole session after some steps of its own: at a random time, or as soon as it writes a checkpoint.
    Returns whether it was still running."""
    first = last_step(run)
    wait_for(
        lambda: last_step(run) > first or run.summary.is_file() or process.poll() is not None,
        process,
        LIMIT_S,
    )
    in_a_save, delay_s = draw.random() < 0.6, draw.uniform(0, 0.4)
    deadline = time.monotonic() + 10 * delay_s
    time.sleep(delay_s)
    while in_a_save and not list(run.checkpoints.glob("*.partial")) and time.monotonic() < deadline:
        pass
    time.sleep(draw.uniform(0, 0.02) if in_a_save else 0)
    alive = process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    finish(process, LIMIT_S)
    return alive


def last_step(run: RunDirectory) -> int:
    records = read_metrics(run.metrics) if run.metrics.is_file() else []
    return int(records[-1]["step"]) if records else 0


def kill_and_check(config: Path, run: RunDirectory, kills: int, lag: int, seed: int) -> int:
    """Starts and kills a run again and again; returns how often it was killed alive. Each time: no checkpoint but whole
    ones, the newest at most `lag` steps behind the metrics, and never older than it was."""
    draw, newest, killed = random.Random(seed), 0, 0
    run.path.mkdir(exist_ok=True)  # so that the first start with --resume begins the run
    for _ in range(kills):
        process = start(config, "--resume")
        killed += kill_at_a_moment(process, run, draw)
        measured, saved = last_step(run), run.saved.steps()
        assert [run.saved.find_damage(step) for step in saved] == [None] * len(saved)
        assert measured - lag <= max(saved, default=0) >= newest
        newest = max(saved, default=0)
    return killed


@pytest.mark.parametrize("asynchronous, lag", [("false", 1), ("true", 2)])
def test_six_kills_lose_at_most_the_steps_since_the_last_save_and_change_nothing(
    asynchronous: str, lag: int, model: Path, tmp_path: Path
) -> None:
    """Saved after every step; in the background a save becomes a checkpoint at the end of the next step at the latest."""
    options = (
        *DETERMINISTIC,
        "run.steps=150",
        "checkpoint.every_steps=1",
        f"checkpoint.asynchronous={asynchronous}",
    )
    train(busy_config(model, tmp_path, *options, "run.name=whole"))
    config = write_config(busy_config(model, tmp_path, *options), tmp_path / "config.yaml")
    run = RunDirectory(tmp_path / "letters")
    assert kill_and_check(config, run, kills=6, lag=lag, seed=3) == 6
    assert train(load_config(config, ["run.resume=true"]))["status"] == "finished"
    assert_same_training(run, RunDirectory(tmp_path / "whole"), bound=0.0)


def test_kills_of_four_ranks_cost_no_checkpoint_and_leave_no_process(
    model: Path, tmp_path: Path
) -> None:
    options = (
        *DETERMINISTIC,
        *TP2_PP2,
        "run.steps=100000",
        "checkpoint.every_steps=1",
        "checkpoint.asynchronous=true",
    )
    config = write_config(busy_config(model, tmp_path, *options), tmp_path / "config.yaml")
    run = RunDirectory(tmp_path / "letters")
    assert kill_and_check(config, run, kills=3, lag=2, seed=5) == 3
    done = run.saved.steps()[-1]
    alone = busy_config(model, tmp_path, *DETERMINISTIC, f"run.steps={done + 1}", "run.resume=true")
    assert train(alone)["steps"] == done + 1


# ---------------------------------------------------------------- whole runs, at every moment

TP2 = ("cluster.ranks=2", "trainer.tensor_parallel=2")
ASYNCHRONOUS = ("checkpoint.asynchronous=true",)
MOMENTS = ("step", "save", "evaluation", "start")
EVALUATED = 3  # steps


def is_moment(run: RunDirectory, moment: str, first: int, before: set[Path]) -> bool:
    """Whether the run, which began at step `first` with some files, is doing that now, as far as its files show."""
    if moment == "export":
        return not set(run.path.glob("export*")) <= before
    if moment == "save":
        return bool(list(run.checkpoints.glob("*.partial")))
    if moment == "evaluation":  # has a multiple of so many steps, and no evaluation of the last one
        last = rows(run)[-1] if rows(run) else (0, "train", None)
        return last[0] % EVALUATED == 0 and last[1] == "train"
    return moment == "start" or last_step(run) > first


def rows(run: RunDirectory) -> list[tuple[int, str, float | None]]:
    """(step, train or eval, questions) of every line of metrics.jsonl, but for one that a kill cut short."""
    lines = run.metrics.read_bytes().split(b"\n")[:-1] if run.metrics.is_file() else []
    records = list(map(json.loads, lines))
    return [
        (one["step"], "train" if "train/loss" in one else "eval", one.get("eval/questions"))
        for one in records
    ]


@pytest.mark.parametrize(
    ("kills", "layout", "bound"),
    [
        pytest.param(9, (), 0.0, id="one process"),
        pytest.param(9, ASYNCHRONOUS, 0.0, id="asynchronous"),
        pytest.param(6, TP2, 1e-6, id="ranks"),
        pytest.param(6, (*TP2, *ASYNCHRONOUS), 1e-6, id="ranks, asynchronous"),
    ],
)
def test_thirty_kills_at_every_moment_of_a_run_change_nothing(
    kills: int, layout: tuple[str, ...], bound: float, model: Path, tmp_path: Path
) -> None:
    """Of starts, steps, saves, evaluations and, at last, the final evaluation and the export: the run that is resumed after each
    is the one that nobody disturbed, and no row of metrics.jsonl stands there twice. The last evaluation has more questions than
    the others."""
    options = (
        *DETERMINISTIC,
        *layout,
        "run.steps=18",
        "checkpoint.every_steps=1",
        "evaluation.every_steps=3",
    )
    options += (
        "evaluation.questions=12",
        "evaluation.samples_per_prompt=8",
        "trainer.optimizer.eps=1e-5",
    )
    train(busy_config(model, tmp_path, *options, "run.name=whole"))
    config = write_config(busy_config(model, tmp_path, *options), tmp_path / "config.yaml")
    run = RunDirectory(tmp_path / "letters")
    run.path.mkdir()  # so that the first start with --resume begins the run
    draw = random.Random(f"{kills} {layout}")
    moments = [MOMENTS[number % len(MOMENTS)] for number in range(kills - 2)]
    draw.shuffle(moments)
    hit = []
    for moment in (*moments, "export", "export"):
        first, before = last_step(run), set(run.path.glob("export*"))
        process, began = start(config, "--resume"), time.monotonic()
        while not is_moment(run, moment, first, before) and process.poll() is None:
            assert time.monotonic() - began < LIMIT_S, moment
            time.sleep(0.001)
        time.sleep(
            draw.uniform(0, {"start": 12.0, "step": 0.4, "evaluation": 0.3}.get(moment, 0.05))
        )
        hit += [moment] if process.poll() is None else []
        os.killpg(process.pid, signal.SIGKILL)
        finish(process, LIMIT_S)
        assert len(set(rows(run))) == len(rows(run)), rows(run)
    assert len(hit) >= kills - 1, hit  # the last may come after the end
    train(load_config(config, ["run.resume=true"]))
    whole = RunDirectory(tmp_path / "whole")
    assert rows(run) == rows(whole) and not list(run.path.rglob("*.partial"))
    assert_same_training(run, whole, bound=bound)
    print(f"{len(hit)} kills: {hit}")


def assert_same_training(run: RunDirectory, other: RunDirectory, bound: float) -> None:
    """Metrics of all steps but times and memory, and the final weights, relative to their size.

    No softmax depends on a key's bias: its gradient is rounding alone, which differs by layout and which Adam makes steps of."""
    ours, theirs = WeightFiles(run.export), WeightFiles(other.export)
    for name in theirs:
        distance = (ours[name].double() - theirs[name].double()).norm()
        share = 10 * bound if name.endswith("k_proj.bias") else bound
        assert distance <= share * theirs[name].double().norm(), name
    records = [
        [
            {
                name: value
                for name, value in one.items()
                if not name.startswith(("time", "speed", "eval/", "memory"))
            }
            for one in found
        ]
        for found in (read_metrics(run.metrics), read_metrics(other.metrics))
    ]
    for ours_, theirs_ in zip(*records, strict=True):
        assert ours_ == pytest.approx(theirs_, rel=bound, abs=bound)


def test_a_run_over_ray_resumes_to_1e_6_there_and_in_other_layouts(
    model: Path, tmp_path: Path
) -> None:
    """Uninterrupted at TP2 x PP2, against its middle checkpoint continued there, in one process and at TP2 x DP2 with the
    distributed optimizer. Loss and gradient norm are near zero at times, so metrics may differ by 1e-6 in absolute terms."""
    pytest.importorskip("ray")
    options = (
        *DETERMINISTIC,
        "run.steps=6",
        "checkpoint.every_steps=3",
        "evaluation.at_start=false",
        "trainer.optimizer.eps=1e-5",
    )
    train(busy_config(model, tmp_path, *options, *TP2_PP2))
    whole = RunDirectory(tmp_path / "letters")
    for number, layout in enumerate((TP2_PP2, (), TP2_DP2)):
        runs = tmp_path / str(number)
        shutil.copytree(whole.path, runs / "letters")
        train(busy_config(model, runs, *options, *layout, "run.resume=true", "run.resume_step=3"))
        assert_same_training(RunDirectory(runs / "letters"), whole, bound=1e-6)


# ---------------------------------------------------------------- ranks and signals


def test_signals_end_ranks_too_and_the_run_resumes_in_one_process(
    model: Path, tmp_path: Path
) -> None:
    """Two trainer ranks as Ray actors; after Ctrl-C no process is left, and the checkpoint fits another layout."""
    pytest.importorskip("ray")
    options = (
        "run.steps=100000",
        "cluster.ranks=2",
        "trainer.tensor_parallel=2",
        "checkpoint.every_steps=0",
    )
    config = write_config(busy_config(model, tmp_path, *options), tmp_path / "config.yaml")
    run = RunDirectory(tmp_path / "letters")
    process = start(config)
    wait_for(reached(run, 2), process, LIMIT_S)
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) > 4  # Ray's own, and the ranks
    process.send_signal(signal.SIGINT)
    finish(process, LIMIT_S)
    assert process.returncode == 130
    assert psutil.wait_procs(started, timeout=10)[1] == []
    done = read_json(run.summary)["steps"]
    summary = train(busy_config(model, tmp_path, f"run.steps={done + 1}", "run.resume=true"))
    assert summary["status"] == "finished" and summary["steps"] == done + 1


@pytest.mark.parametrize(
    "processes, sent, code",
    [
        (1, signal.SIGTERM, 143),
        (6, signal.SIGTERM, 143),
        (9, signal.SIGTERM, 143),
        (5, signal.SIGINT, 130),
    ],
)
def test_a_signal_while_ranks_start_leaves_no_process_and_no_run(
    processes: int, sent: signal.Signals, code: int, model: Path, tmp_path: Path
) -> None:
    """Sent when so many processes of Ray are up: from the first of its servers to the last of the ranks."""
    pytest.importorskip("ray")
    options = ("run.steps=100000", "cluster.ranks=2", "trainer.tensor_parallel=2")
    config = write_config(busy_config(model, tmp_path, *options), tmp_path / "config.yaml")
    process = start(config)
    family: dict[int, psutil.Process] = {}

    def enough() -> bool:
        family.update(
            {one.pid: one for one in psutil.Process(process.pid).children(recursive=True)}
        )
        return len(family) >= processes

    wait_for(enough, process, LIMIT_S)
    process.send_signal(sent)
    error = finish(process, LIMIT_S)
    assert process.returncode == code and "Traceback" not in error, error
    # The guard is one of them, and looks around once more before it goes
    until(
        lambda: (
            not any(
                one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in family.values()
            )
        ),
        10.0,
    )
    assert not (tmp_path / "letters").exists()
