"""The learning rate by hand."""

from __future__ import annotations

import pytest

from rlflow.errors import ConfigError
from rlflow.trainer.schedule import learning_rate


def rates(steps: int, **options: object) -> list[float]:
    values = {"lr": 1.0, "schedule": "constant", "warmup_steps": 0, "decay_steps": None, "min_lr": 0.0, **options}
    return [learning_rate(step, **values) for step in range(steps)]  # type: ignore[arg-type]


def test_constant_after_a_linear_warm_up():
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_decay_reaches_the_minimum_at_decay_steps_and_stays():
    expected = [0.5, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1]
    assert rates(8, schedule="linear", warmup_steps=2, decay_steps=6, min_lr=0.1) == pytest.approx(expected)


def test_cosine_decay_is_half_way_at_half_time():
    expected = [1.0, 0.8535534, 0.5, 0.1464466, 0.0, 0.0]
    assert rates(6, schedule="cosine", decay_steps=4) == pytest.approx(expected, abs=1e-7)


def test_a_warm_up_longer_than_the_decay_ends_at_the_minimum():
    assert rates(5, schedule="cosine", warmup_steps=3, decay_steps=2, min_lr=0.2) == pytest.approx(
        [1 / 3, 2 / 3, 1, 0.2, 0.2]
    )


def test_the_rate_never_rises_after_the_warm_up():
    for schedule in ("cosine", "linear"):
        values = rates(60, schedule=schedule, warmup_steps=5, decay_steps=50, min_lr=0.01)
        assert values[4:] == sorted(values[4:], reverse=True) and values[-1] == 0.01


def test_a_wrong_schedule_or_an_endless_decay_is_a_config_error():
    with pytest.raises(ConfigError, match="Did you mean 'cosine'"):
        rates(1, schedule="cosin")
    with pytest.raises(ConfigError, match="lr_decay_steps"):
        rates(1, schedule="linear")
