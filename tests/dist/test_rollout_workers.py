"""Rollout workers as real Ray actors: the same training as in one process, and kills that cost nothing but time."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from rlflow.config.schema import RunConfig
from rlflow.errors import RLFlowError
from rlflow.loop import train
from rlflow.models.huggingface import WeightFiles
from rlflow.report.records import read_trajectories
from rlflow.report.sinks import read_metrics
from rlflow.run.directory import RunDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # scripts, no package

import chaos

from tests.flow.letters import LEARNING, letters_config, write_letters_model
from tests.flow.test_asynchronous import AHEAD, assert_trained_exactly_once

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="pip install 'PATH_OR_GIT_URL[ray]'"
    ),
]
IN_STEP = (*LEARNING, "run.deterministic=true", "metrics.trajectories_per_step=1000000", "metrics.picture=false", "run.steps=3",
           "evaluation.questions=4", "checkpoint.every_steps=0")  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_letters_model(tmp_path_factory.mktemp("model") / "letters")


@pytest.fixture(autouse=True)
def leaves_no_process() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    left = [
        process for process in psutil.Process().children(recursive=True) if process not in before
    ]
    _, alive = psutil.wait_procs(left, timeout=15.0)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As a worker has: sums may come out otherwise with more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def workers_of(process: psutil.Process | None = None) -> list[psutil.Process]:
    """The processes of rollout workers."""
    found = []
    for child in (process or psutil.Process()).children(recursive=True):
        try:
            if (
                "WorkerActor" in " ".join(child.cmdline())
                and child.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


@contextmanager
def meanwhile(action: Callable[[], None]) -> Iterator[None]:
    """Does it in another thread; an error of its fails the test."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    thread.join(60.0)
    assert not thread.is_alive() and not errors, errors


def step_reached(run: RunDirectory, step: int, within_s: float = 120.0) -> None:
    until = time.monotonic() + within_s
    while not (
        run.metrics.is_file()
        and read_metrics(run.metrics)
        and read_metrics(run.metrics)[-1]["step"] >= step
    ):
        assert time.monotonic() < until, f"step {step} was not reached"
        time.sleep(0.02)


def outcome(config: RunConfig) -> tuple[list, dict[str, torch.Tensor]]:
    """What a run trained, (id, tokens and log-probs) of every trajectory, and its final weights."""
    train(config)
    run = RunDirectory.open(Path(config.run.directory.format(name=config.run.name)))
    played = [
        [
            (record["id"], record["turns"], record["reward"])
            for record in read_trajectories(run.trajectories(step))
        ]
        for step in range(1, config.run.steps + 1)
    ]
    for step in played:
        for _, turns, _ in step:
            for turn in turns:
                turn.pop("duration_s", None)
    weights = WeightFiles(run.export)
    return played, {name: weights[name] for name in weights}


def assert_same(found: tuple, expected: tuple) -> None:
    assert found[0] == expected[0]
    assert set(found[1]) == set(expected[1])
    assert all(torch.equal(value, expected[1][name]) for name, value in found[1].items())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "trained",
    [(), ("trainer.lora={rank: 4, alpha: 8}", "trainer.lr=1e-2", "model.dtype=bfloat16")],
    ids=["weights", "adapters"],
)
def test_no_worker_one_and_two_train_alike_bit_for_bit_even_where_one_is_killed(
    model: Path, tmp_path: Path, trained: tuple[str, ...]
) -> None:
    """Of adapters the one that is started again has the base, and gets the newest."""
    asked = (*IN_STEP, *trained)
    expected = outcome(letters_config(model, tmp_path / "alone", *asked))
    assert_same(
        outcome(letters_config(model, tmp_path / "one", *asked, "cluster.rollout_workers=1")),
        expected,
    )
    run = RunDirectory(tmp_path / "two" / "letters")

    def kill() -> None:
        step_reached(run, 1)
        for process in workers_of()[:1]:
            process.kill()

    with meanwhile(kill):
        assert_same(
            outcome(letters_config(model, tmp_path / "two", *asked, "cluster.rollout_workers=2")),
            expected,
        )


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_and_stopped_workers_lose_attempts_that_are_played_again_and_trained_exactly_once(
    model: Path, tmp_path: Path
) -> None:
    steps = 60
    options = (*AHEAD, *LEARNING, f"run.steps={steps}", "cluster.rollout_workers=2", "rollout.faults.call_s=4",
               "evaluation.every_steps=0", "evaluation.final_questions=4", "trainer.lr=1e-4",
               "checkpoint.every_steps=3")  # fmt: skip
    run, hurt = RunDirectory(tmp_path / "letters"), []

    def hurt_them() -> None:
        for step, number in ((2, signal.SIGKILL), (20, signal.SIGSTOP)):
            step_reached(run, step)
            while len(workers_of()) < 2:
                time.sleep(0.1)
            os.kill(workers_of()[0].pid, number)
            hurt.append(number)

    with meanwhile(hurt_them):
        train(letters_config(model, tmp_path, *options))
    assert hurt == [signal.SIGKILL, signal.SIGSTOP]
    assert_trained_exactly_once(run, steps, samples=8)
    records = [record for record in read_metrics(run.metrics) if "workers/up" in record]
    assert sum(record["workers/attempts_lost"] for record in records) > 0
    assert sum(record["workers/restarts"] for record in records) >= 2
    assert any(record["workers/attempts_fewest"] > 0 for record in records)  # both play


@pytest.mark.slow
def test_a_worker_that_can_never_start_is_one_error(model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        RLFlowError, match=r"^rollout.engine.kv_tokens: expected a whole number from 32"
    ):
        train(
            letters_config(
                model, tmp_path, "cluster.rollout_workers=2", "rollout.engine.kv_tokens=1"
            )
        )
    assert not (tmp_path / "letters").exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_minutes_of_chaos_cost_time_alone() -> None:
    assert chaos.main(["--minutes", "2", "--task", "game", "--ranks", "2"]) == 0
