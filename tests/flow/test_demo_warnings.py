"""Faults that are planted in the demo are told by the right sentence, and by no other; the demo itself is told nothing."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
from rlflow_tools.view.findings import findings
from rlflow_tools.view.recorded import RunFiles

from rlflow.config.schema import load_config
from rlflow.loop import train
from rlflow.report.alarms import DRIFT, NEVER_STOPPING, NO_DIFFERENCE, Watch
from rlflow.rollout import Rollout
from rlflow_environments.common.transcript import Transcript
from rlflow_environments.search import SearchEnvironment

pytestmark = pytest.mark.slow
SHORT = ("run.steps=5", "run.name=short", "rollout.prompts_per_step=6", "trainer.schedule.warmup_steps=1",
         "evaluation.at_start=false", "evaluation.every_steps=0", "evaluation.final_questions=4", "checkpoint.every_steps=0",
         "checkpoint.export=false", "metrics.picture=false", "metrics.progress=none")  # fmt: skip
HERE = Path(__file__).resolve()


class NeverStops(SearchEnvironment):
    """Waits for a string that the policy does not know."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.stop = ("</never>",)


def nothing(transcript: Transcript) -> float:
    """The same for whatever was done."""
    return 0.0


def guess(transcript: Transcript) -> float:
    """By the words of the policy alone, whatever it found."""
    return float(zlib.crc32(transcript.model_text.encode()) % 2)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("world")


def told(world: Path, path: Path, *overrides: str) -> list[str]:
    """The names of what a run of a few steps was told while it went on, with which its viewer begins."""
    places = [f"run.directory={path}/{{name}}", f"environment.world.directory={world}"]
    train(load_config("recipes/searchr1/config/short.yaml", [*SHORT, *places, *overrides]))
    run = RunFiles.open(path / "short")
    found, log = Watch(run.registered).recall(run.metrics), (path / "short" / "log.txt").read_text()
    assert all(
        f"WARNING rlflow.run.step_log: step {fault.step}: {fault.text}" in log for fault in found
    )
    assert log.count("WARNING rlflow.run.step_log: ") == len(found)
    assert findings(run)[: len(found)] == found
    return [fault.name for fault in found]


def test_the_demo_is_told_nothing(world: Path, tmp_path: Path) -> None:
    assert told(world, tmp_path) == []


def test_a_stop_string_that_never_matches(world: Path, tmp_path: Path) -> None:
    assert told(world, tmp_path, f"environment.name={HERE}:NeverStops") == [NEVER_STOPPING]


def test_a_reward_that_is_the_same_for_all(world: Path, tmp_path: Path) -> None:
    assert told(world, tmp_path, f"environment.reward={HERE}:nothing") == [NO_DIFFERENCE]


def test_a_reward_that_ignores_the_evidence(world: Path, tmp_path: Path) -> None:
    assert told(world, tmp_path, f"environment.reward={HERE}:guess") == [
        "rewarded without evidence"
    ]


def test_an_engine_with_old_weights(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(rollout: Rollout, weights: object, version: int, probe: object = None) -> None:
        """The engine takes the version for the weights."""
        rollout.version = rollout.engines[0]._scheduler.runner.version = version

    monkeypatch.setattr(Rollout, "load_weights", load)
    assert told(world, tmp_path, "run.steps=6") == [DRIFT]
