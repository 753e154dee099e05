"""A run whose rollout workers, here threads, have engines that cannot hash their weights: probed after every update."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlflow.cluster.pool import WorkerPool
from rlflow.cluster.slots import Handle
from rlflow.config.schema import load_config
from rlflow.errors import ConfigError, RolloutError
from rlflow.loop import train
from rlflow.report.sinks import read_metrics
from rlflow.run import rollout_workers as workers
from rlflow.run.evaluate import evaluate
from rlflow.run.rollout_workers import RolloutWorker, WorkerRollout
from tests.flow.letters import letters_config, write_letters_model
from tests.unit.environments.swarm.peers import letters_rollout
from tests.unit.rollout.buckets import Held
from tests.unit.run import test_probe
from tests.unit.run.test_probe import FEW

WORKERS = (
    *FEW,
    "cluster.rollout_workers=2",
    "rollout.samples_per_prompt=8",
    "evaluation.every_steps=0",
    "metrics.picture=false",
)


class ThreadWorkers:
    """In place of `RayWorkers`: real workers in threads of this process, by the same calls."""

    def __init__(
        self,
        make: Callable[[str, int, dict[str, Any]], RolloutWorker],
        count: int,
        *,
        read: Any,
        limits: Any,
        **_: Any,
    ) -> None:
        self._make = make
        self.pool = WorkerPool(self._launch, count, read, limits)
        self.close = self.pool.close

    def _launch(self, name: str) -> Handle:
        return ThreadWorker(self._make(name, torch.get_num_threads(), {}))


class ThreadWorker:
    def __init__(self, worker: RolloutWorker) -> None:
        self._worker = worker
        self._calls, self._looks = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        threads = self._looks if method == "look" else self._calls
        return threads.submit(getattr(self._worker, method), *arguments)

    def kill(self) -> None:
        self._calls.submit(lambda: self._worker._rollout and self._worker._rollout.close())
        self._calls.shutdown(wait=False)
        self._looks.shutdown(wait=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_letters_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "RayWorkers", ThreadWorkers)
    monkeypatch.setattr(workers, "put", Held)


def outcome(model: Path, runs: Path, engine: str, *options: str) -> dict[str, Any]:
    return train(
        letters_config(
            model, runs, *WORKERS, f"rollout.engine.name={test_probe.__name__}:{engine}", *options
        )
    )


def test_workers_whose_engines_cannot_hash_their_weights_train(model: Path, tmp_path: Path) -> None:
    summary = outcome(model, tmp_path, "Unhashed")
    steps = [one for one in read_metrics(summary["written"]["metrics"]) if "train/reward" in one]
    assert summary["steps"] == len(steps) == 2 and all(one["workers/up"] > 0 for one in steps)


def test_what_workers_count_waits_for_the_step_although_an_evaluation_comes_first() -> None:
    with letters_rollout() as rollout:
        left = [{"workers/restarts": 1.0}]
        pool = SimpleNamespace(
            reports=lambda: [{"world/games": 2.0}], counts=lambda: left.pop() if left else {}
        )
        rollout.pool = pool  # type: ignore[attr-defined]
        rollout.take_report = partial(WorkerRollout.take_report, rollout)  # type: ignore[method-assign, arg-type]
        evaluate(rollout, rollout.environment.tasks("train")[:1])
        assert rollout.report == {"world/games": 2.0}
        assert WorkerRollout.counts(rollout) == {"workers/restarts": 1.0}  # type: ignore[arg-type]


def test_workers_whose_engines_keep_old_weights_end_the_run(model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        RolloutError,
        match=r"after version \d engine and trainer differ by .* nats on a token of the probe",
    ):
        outcome(model, tmp_path, "Forgetful")


def test_an_engine_that_takes_no_weights_is_refused_in_workers_too(
    model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engine: Fixed takes no weights"):
        outcome(model, tmp_path, "Fixed")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("engine", "start_s"),
    [
        ("{name: vllm, start_s: 1800}", 1860.0),
        ("vllm", 960.0),
        ("{name: vllm, start_s: 60}", 600.0),
        ("embedded", 600.0),
    ],
)
def test_a_worker_may_take_as_long_to_start_as_its_engine(engine: str, start_s: float) -> None:
    """A vLLM that needed longer than 600 s was ended and started again, whatever its `start_s` said."""
    config = load_config(None, ["environment.name=none", f"rollout.engine={engine}"])
    assert workers.pool_limits(config.rollout).start_s == start_s
