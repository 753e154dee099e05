"""Every preset trains: three steps of the short demo, through the same code as `rlflow train`."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlflow.config.loading import presets
from rlflow.config.schema import load_config
from rlflow.loop import train
from rlflow.report.sinks import read_metrics
from tests.flow.letters import asked_of_the_user

DEMO = Path("recipes/searchr1")
SHORT = ("run.steps=3", "run.name=short", "rollout.prompts_per_step=8", "evaluation.at_start=false", "evaluation.every_steps=0",
         "evaluation.final_questions=4", "checkpoint.every_steps=0", "checkpoint.export=false", "metrics.picture=false",
         "metrics.progress=none")  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("world")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The starting policy, its weights changed by a tenth: a teacher of another opinion."""
    path = tmp_path_factory.mktemp("teacher") / "policy"
    shutil.copytree(DEMO / "starting_policy", path)
    generator = torch.Generator().manual_seed(3)
    weights = load_file(path / "model.safetensors")
    changed = {
        name: value * (1 + 0.1 * torch.randn(value.shape, generator=generator))
        for name, value in weights.items()
    }
    save_file(changed, path / "model.safetensors", metadata={"format": "pt"})
    return path


def with_named_rewards(world: Path) -> str:
    """The override that puts the demo's environment under a rubric, whose criteria are rewards with names."""
    demo = load_config(DEMO / "config" / "short.yaml", [f"environment.world.directory={world}"])
    criteria = {
        "right": "base_return",
        "searched": {"name": "pattern", "pattern": "<search>", "whole": True},
    }
    wrapped = {"name": "rubric", "base": dict(demo.environment), "criteria": criteria}
    return f"environment={json.dumps(wrapped)}"


@pytest.mark.slow
@pytest.mark.parametrize("name", presets())
def test_a_preset_trains_three_steps_of_the_demo(
    name: str, world: Path, teacher: Path, tmp_path: Path
) -> None:
    asked = asked_of_the_user(name, tmp_path / "shared", teacher)
    environment = f"environment.world.directory={world}"
    if name == "gdpo":
        environment = with_named_rewards(world)
    places = [f"run.directory={tmp_path}/{{name}}", environment]
    train(load_config(DEMO / "config" / "short.yaml", [*SHORT, *places, *asked], name))
    records = [
        row for row in read_metrics(tmp_path / "short" / "metrics.jsonl") if "train/loss" in row
    ]
    assert [row["step"] for row in records] == [1, 2, 3]
    for row in records:
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
        assert row["train/gradient_norm"] > 0
        if name == "sapo_swarm":  # alone: its own groups stand in for those of others
            assert (row["train/swarm_published"], row["train/swarm_missing"]) == (8, 4)
