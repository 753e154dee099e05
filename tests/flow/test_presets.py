"""Every preset trains: three steps of the tiny environment, through the same code as `rlflow train`."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rlflow.config.loading import presets
from rlflow.loop import train
from rlflow.metrics.sinks import read_metrics
from tests.flow.letters import asked_of_the_user, letters_config, write_letters_model

SHORT = ("run.steps=3", "evaluation.at_start=false", "evaluation.every_steps=0", "evaluation.final_questions=4",
         "checkpoint.every_steps=0", "checkpoint.export=false", "metrics.picture=false", "trainer.lr=1e-3")  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_letters_model(tmp_path_factory.mktemp("model") / "letters")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_letters_model(tmp_path_factory.mktemp("teacher") / "letters", seed=3, scale=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("name", presets())
def test_a_preset_trains_three_steps(name: str, model: Path, teacher: Path, tmp_path: Path) -> None:
    asked = asked_of_the_user(name, tmp_path / "shared", teacher)
    train(letters_config(model, tmp_path, *SHORT, *asked, preset=name))
    records = [row for row in read_metrics(tmp_path / "letters" / "metrics.jsonl") if "train/loss" in row]
    assert [row["step"] for row in records] == [1, 2, 3]
    for row in records:
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
        assert row["train/gradient_norm"] > 0
        if name == "sapo_swarm":  # alone: its own groups stand in for those of others
            assert (row["train/swarm_published"], row["train/swarm_missing"]) == (8, 4)
