"""A run over a wrapped environment: a rubric's named rewards are weighed by the advantage, and the task is learned from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlflow.loop import train
from tests.flow.letters import LEARNING, REFERENCE, letters_config, write_letters_model


def demanding(played) -> float:
    """1 where the policy says what it should not: a criterion with another scale than the answer's."""
    return 100.0 * any(response == "?" for response in played.responses)


@pytest.mark.slow
def test_a_task_is_learned_from_the_named_rewards_of_a_rubric(tmp_path: Path) -> None:
    rules = {
        "right": "base_return",
        "demands": {"name": f"{Path(__file__).resolve()}:demanding", "weight": -0.01},
    }
    environment = {"name": "rubric", "base": {"name": REFERENCE}, "criteria": rules}
    advantage = "algorithm.advantage={name: gdpo, weights: {right: 1.0, demands: -0.5}}"
    options = (*LEARNING, f"environment={json.dumps(environment)}", advantage)
    train(letters_config(write_letters_model(tmp_path / "m"), tmp_path, *options))
    rows = [
        json.loads(line)
        for line in (tmp_path / "letters" / "metrics.jsonl").read_text().splitlines()
    ]
    first, *_, last = [row for row in rows if "train/reward/right" in row]
    assert (
        last["train/reward/right"] > 0.9 > first["train/reward/right"]
        and last["train/reward/demands"] < 10
    )
    assert last["train/exact_match"] > 0.8
