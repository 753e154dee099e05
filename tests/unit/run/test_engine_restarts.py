"""A run whose engine is killed: it is started again with the present weights, a few times; then the run is saved and ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlflow.config.schema import RunConfig
from rlflow.errors import RolloutError
from rlflow.loop import training_step
from rlflow.report.sinks import read_metrics
from rlflow.rollout.vllm import launch
from rlflow.rollout.vllm.vllm_engine import VLLMEngine
from rlflow.run.engine_keeper import MOST_RESTARTS
from rlflow.run.open import open_run
from rlflow.run.run import Run
from rlflow.storage.files import read_json
from rlflow.types import Trajectory
from tests.flow.letters import letters_config, write_letters_model
from tests.reference import ORACLE
from tests.unit.rollout.vllm.real import NEEDS_VLLM

FAKE = Path(__file__).parents[1] / "rollout" / "vllm" / "fake_server.py"
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
OPTIONS = ("run.steps=3", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=2", "evaluation.questions=4",
           "evaluation.final_questions=4", "evaluation.every_steps=0", f"trainer.backend={ORACLE}", "checkpoint.export=false",
           "checkpoint.every_steps=0", "metrics.picture=false", "rollout.engine={name: vllm, max_concurrency: 4}")  # fmt: skip
Make = Callable[..., RunConfig]


@pytest.fixture(params=["fake", pytest.param("real", marks=NEEDS_VLLM)])
def config(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Configurations of a run over the worker of the tests, whose log-probs are nobody's, or over vLLM."""
    model = write_letters_model(tmp_path / "model", **SIZES)
    if request.param == "fake":
        (tmp_path / "packages" / "vllm").mkdir(parents=True)
        (tmp_path / "packages" / "vllm" / "__init__.py").touch()
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
        monkeypatch.setenv(launch.VARIABLE, sys.executable)
        monkeypatch.setattr(launch, "PROGRAM", (str(FAKE),))
        monkeypatch.setattr("rlflow.run.assemble.TOLERANCE", 1e9)
    return lambda *options: letters_config(model, tmp_path / "runs", *OPTIONS, *options)


def play(run: Run, killed: Callable[[Run, int], bool]) -> list[str]:
    """The loop of `train`; the names of the groups that were trained. killed: whether the engine is killed now, after so many
    episodes."""
    show, episodes, trained = run.rollout.on_episode, [], []

    def told(ended: int, total: int, trajectory: Trajectory) -> None:
        episodes.append(trajectory)
        if killed(run, len(episodes)):
            (engine,) = run.rollout.engines
            assert isinstance(engine, VLLMEngine)
            os.kill(engine.server.served.child.pid, signal.SIGKILL)
        if show is not None:
            show(ended, total, trajectory)

    run.rollout.on_episode = told
    for groups in run.groups():
        assert all(one.usable for group in groups for one in group.trajectories)
        versions = [
            segment.versions for g in groups for one in g.trajectories for segment in one.segments
        ]
        assert all(
            0 <= run.step - int(one.max()) <= run.config.asynchrony.max_staleness
            for one in versions
        )
        trained += [group.id for group in groups]
        metrics = training_step(
            run.step, groups, run.trainer, run.algorithm, run.timer, run.observe
        )
        run.sync_weights(version=run.step + 1)
        run.finish_step(metrics, groups)
    run.finish()
    return trained


def test_a_killed_engine_is_started_again_and_nothing_is_lost(config: Make, tmp_path: Path) -> None:
    """In the middle of the second step, and with the last episode of it: then new weights find that it has ended."""
    with open_run(config()) as run:
        play(run, lambda run, count: run.step == 1 and count in (10, 16))
    assert run.step == 3
    records = [
        line
        for line in read_metrics(tmp_path / "runs" / "letters" / "metrics.jsonl")
        if "train/loss" in line
    ]
    assert [line["rollout/engine_restarts"] for line in records] == [0, 2, 2]
    assert [line["rollout/episodes"] for line in records] == [8, 8, 8]


def test_one_that_plays_ahead_of_training_is_started_again_too(
    config: Make, tmp_path: Path
) -> None:
    deaths: list[int] = []

    def once(run: Run, count: int) -> bool:
        if run.step != 1 or deaths:
            return False
        deaths.append(count)
        return True

    with open_run(
        config("rollout.asynchronous={max_staleness: 2, run_ahead: 1}", "run.steps=5")
    ) as run:
        trained = play(run, once)
    records = [
        line
        for line in read_metrics(tmp_path / "runs" / "letters" / "metrics.jsonl")
        if "train/loss" in line
    ]
    assert deaths and records[-1]["rollout/engine_restarts"] == 1
    assert [line["rollout/episodes"] for line in records] == [8] * 5 and len(set(trained)) == len(
        trained
    ) == 20


@pytest.mark.parametrize("config", ["fake"], indirect=True)
def test_one_that_is_killed_again_and_again_ends_the_run_which_is_saved(
    config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state that is saved is that of the step's start: the tasks of the step that was lost are played again."""
    sources: list[object] = []

    def killed(run: Run, count: int) -> bool:
        if run.step == 1:
            sources.append((run._before_step or {})["source"])
            monkeypatch.setenv("RLFLOW_FAKE_IS_KILLED", "1")  # and all that are started from now on
        return run.step == 1 and count == 10

    with pytest.raises(
        RolloutError, match=r"killed by SIGKILL; was memory used up.*again 3 times before"
    ):
        with open_run(config()) as run:
            play(run, killed)
    checkpoint = tmp_path / "runs" / "letters" / "checkpoints" / "step_000001"
    assert read_json(checkpoint / "state.json")["step"] == 1 and MOST_RESTARTS == 3
    monkeypatch.delenv("RLFLOW_FAKE_IS_KILLED")
    with open_run(config("run.resume=true")) as run:
        assert run.step == 1 and read_json(checkpoint / "state.json")["source"] == sources[0]
        play(run, lambda *_: False)
    assert run.step == 3
