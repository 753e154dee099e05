"""Rollout workers on another machine of the Ray cluster, which joins, is cut off, comes back, and loses its power."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rlflow.report.sinks import read_metrics
from rlflow.run.directory import RunDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # scripts, no package

from chaos_runs import problems_of, write_run
from hosts import CUT_S

from tests.machines import CLEAN, Machines, refusal

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="pip install 'PATH_OR_GIT_URL[ray]'"
    ),
]
LIMIT_S = 150.0


@pytest.fixture
def machines() -> Iterator[Machines]:
    if told := refusal():
        pytest.skip(told)
    both = Machines()
    yield both
    both.close()


def step_of(run: RunDirectory) -> int:
    records = read_metrics(run.metrics) if run.metrics.is_file() else []
    return int(records[-1]["step"]) if records else 0


def played_by(run: RunDirectory) -> list[int]:
    """How many of two workers have ended attempts in each step."""
    records = (
        [record for record in read_metrics(run.metrics) if "workers/up" in record]
        if run.metrics.is_file()
        else []
    )
    return [
        (record["workers/attempts_most"] > 0) + (record["workers/attempts_fewest"] > 0)
        for record in records
    ]


def test_a_worker_on_another_machine_joins_is_cut_off_and_loses_its_power_and_nothing_else_is_lost(
    machines: Machines, tmp_path: Path
) -> None:
    config, run = write_run(tmp_path, "far", 100_000, workers=2, ranks=0)
    machines.start_ray(0, cpus=1)  # room for one of the two
    log = tmp_path / "log"
    patient = "rollout.faults={call_s: 10, episode_s: 30, max_aborted_share: 0.5}"  # a busy machine is no outage
    options = [f"cluster.address={machines.cluster}", patient]
    command = [sys.executable, "-m", "rlflow", "train", "--config", str(config), *options]
    with open(log, "wb") as output:
        process = subprocess.Popen(
            machines.command(0, command), env={**os.environ, **CLEAN}, stdout=output, stderr=output
        )

    def wait_for(met: Callable[[], object], what: str) -> None:
        until = time.monotonic() + LIMIT_S
        while not met():
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < until, (
                f"{what} within {LIMIT_S:.0f} s\n{log.read_text()[-3000:]}"
            )
            time.sleep(0.1)

    def goes_on(what: str, steps: int = 5) -> None:
        first = step_of(run)
        wait_for(lambda: step_of(run) >= first + steps, f"{steps} steps after {what}")

    def worker_there() -> int:
        """The process of the worker on the second machine, 0 where there is none."""
        for one in machines.processes(1):
            with contextlib.suppress(psutil.Error):  # it has just ended
                if "WorkerActor" in " ".join(one.cmdline()):
                    return one.pid
        return 0

    def plays_there(what: str) -> int:
        wait_for(worker_there, f"a worker on the second machine after {what}")
        before = len(played_by(run))
        wait_for(lambda: 2 in played_by(run)[before + 1 :], f"two that play after {what}")
        return worker_there()

    try:
        wait_for(lambda: step_of(run) >= 3, "three steps on one machine")
        assert set(played_by(run)) == {1}
        node = machines.start_ray(1, cpus=1)
        first = plays_there("the second machine joined")
        machines.cut()
        begun = time.monotonic()
        goes_on("the cut")
        time.sleep(max(0.0, CUT_S - (time.monotonic() - begun)))
        machines.mend()
        second = plays_there("the cable was mended")
        assert second != first  # who was silent for too long has lost its place
        os.kill(second, signal.SIGSTOP)
        wait_for(
            lambda: worker_there() not in (0, second),
            "a worker in place of the stopped one, which is ended,",
        )
        plays_there("a worker was stopped there")
        machines.end_ray(node, signal.SIGKILL)
        goes_on("the second machine lost its power")
        machines.start_ray(1, cpus=1)
        plays_there("it was switched on again")
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        finally:
            process.kill()
    assert process.returncode == 130, log.read_text()[-3000:]
    assert list(problems_of(run, step_of(run))) == []
    assert "/dev/shm" not in log.read_text()
    until = time.monotonic() + 15
    while worker_there() and time.monotonic() < until:
        time.sleep(0.2)
    assert not worker_there()
