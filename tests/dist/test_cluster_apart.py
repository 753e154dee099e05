"""recipes/asearcher on a Ray cluster apart, as a user starts it: each process is killed, and the run comes to its end."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rlflow.report.records import read_trajectories
from rlflow.report.sinks import read_metrics

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="pip install 'PATH_OR_GIT_URL[ray]'"
    ),
]
RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "asearcher"
SMALL = ("environment.world.size=0.1", "environment.world.train_questions=40", "environment.world.val_questions=20",
         "environment.managed=true", "rollout.prompts_per_step=2", "rollout.samples_per_prompt=2",
         "algorithm.filters=[]", "evaluation.questions=2", "evaluation.final_questions=2", "metrics.trajectories_per_step=1000",
         "metrics.picture=false", "checkpoint.export=false", "checkpoint.every_steps=1")  # fmt: skip
DEADLINE_S = 420.0


def started(script: str, run: Path) -> subprocess.Popen[str]:
    """The script of the recipe, in the environment of these tests."""
    options = [
        f"run.directory={run}",
        "run.steps=6",
        f"environment.world.directory={run.parent}/world",
        *SMALL,
    ]
    variables = {**os.environ, "RLFLOW_VENV": sys.prefix, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        ["bash", str(RECIPE / script), "--recipe", "m2po_delta", *options],
        env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def steps_of(run: Path) -> int:
    records = read_metrics(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
    return max((record["step"] for record in records if "train/loss" in record), default=0)


def wait_until(met: Callable[[], bool], what: str, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not met():
        assert process.poll() is None, f"ended before {what}: {process.communicate()[0][-3000:]}"
        assert time.monotonic() < until, f"waited {DEADLINE_S:.0f} s for {what}"
        time.sleep(0.5)


def trained(run: Path) -> list[tuple[int, str]]:
    """(step, id) of every attempt that was trained."""
    files = sorted((run / "trajectories").glob("step_*.jsonl"))
    return [
        (int(file.stem[5:]), record["id"]) for file in files for record in read_trajectories(file)
    ]


@pytest.mark.slow
def test_the_demo_trains_by_its_command(tmp_path: Path) -> None:
    process = started("run_train.sh", tmp_path / "run")
    output = process.communicate(timeout=DEADLINE_S)[0]
    assert process.returncode == 0, output[-3000:]
    assert steps_of(tmp_path / "run") == 6
    before, after = (re.search(rf"  {name} +EM", output) for name in ("before", "after"))
    assert before and after, output[-2000:]


@pytest.mark.slow
def test_whichever_process_is_killed_the_run_comes_to_its_end(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = started("run_processes.sh", run)
    family: list[psutil.Process] = []
    try:
        for step, victim in ((1, "WorkerActor"), (2, "TrainerRank"), (3, "rlflow train")):
            wait_until(lambda step=step: steps_of(run) >= step, f"step {step}", process)
            family = psutil.Process(process.pid).children(recursive=True)
            found = [
                one for one in family if victim in " ".join(one.cmdline()) and one.name() != "bash"
            ]
            found[0].kill()
        output = process.communicate(timeout=DEADLINE_S)[0]
        assert process.returncode == 0, output[-3000:]
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
    assert output.count("train ended with status") >= 2
    found = trained(run)
    assert (
        len(found) == len({name for _, name in found}) == 6 * 4
    )  # 2 groups of 2 attempts in each step, none twice
    assert sorted({step for step, _ in found}) == [1, 2, 3, 4, 5, 6]
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]
