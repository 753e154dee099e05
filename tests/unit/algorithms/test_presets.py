"""Every preset is a whole algorithm whose parts exist, take its keywords and fit together."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rlflow.config.checks import check_config
from rlflow.config.loading import PRESETS, presets
from rlflow.config.schema import RunConfig, load_config
from rlflow.run.algorithm import Algorithm

NAMES = list(presets())
STARTING_POLICY = Path(__file__).resolve().parents[3] / "recipes" / "searchr1" / "starting_policy"
ASKED = {"opd": [f"algorithm.teacher.path={STARTING_POLICY}"]}
"""What a preset leaves to the user."""


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_a_configuration_and_its_parts_can_be_made(name: str) -> None:
    config = load_config(None, ASKED.get(name, []), preset=name)
    check_config(config, components=False)
    Algorithm.from_config(config, response_budget=100)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_says_what_it_is_and_sets_the_algorithm_alone(name: str) -> None:
    path = PRESETS / f"{name}.yaml"
    assert len(presets()[name]) > 40 and name == name.lower()
    assert set(yaml.safe_load(path.read_text(encoding="utf-8"))) == {"algorithm"}


def test_the_default_algorithm_is_not_hidden_in_a_preset() -> None:
    assert RunConfig().algorithm.losses == [{"name": "ppo_clip"}]
