"""The learning rate by hand."""

from __future__ import annotations

import pytest

from rlflow.errors import ConfigError
from rlflow.trainer.options import TrainerOptions


def rates(steps: int, lr: float = 1.0, **schedule: object) -> list[float]:
    rate = TrainerOptions(lr=lr, schedule={"name": "constant", **schedule}).learning_rate()
    return [rate(step) for step in range(steps)]


def test_constant_after_a_linear_warm_up():
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_decay_reaches_the_minimum_at_decay_steps_and_stays():
    expected = [0.5, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1]
    assert rates(8, name="linear", warmup_steps=2, decay_steps=6, min_lr=0.1) == pytest.approx(
        expected
    )


def test_cosine_decay_is_half_way_at_half_time():
    expected = [1.0, 0.8535534, 0.5, 0.1464466, 0.0, 0.0]
    assert rates(6, name="cosine", decay_steps=4) == pytest.approx(expected, abs=1e-7)


def test_a_warm_up_longer_than_the_decay_ends_at_the_minimum():
    expected = [1 / 3, 2 / 3, 1, 0.2, 0.2]
    assert rates(5, name="cosine", warmup_steps=3, decay_steps=2, min_lr=0.2) == pytest.approx(
        expected
    )


def test_the_rate_never_rises_after_the_warm_up():
    for name in ("cosine", "linear"):
        values = rates(60, name=name, warmup_steps=5, decay_steps=50, min_lr=0.01)
        assert values[4:] == sorted(values[4:], reverse=True) and values[-1] == 0.01


def test_a_decay_without_an_end_ends_with_the_run():
    options = TrainerOptions(lr=1.0, schedule={"name": "linear"}).decaying_over(4)
    assert [options.learning_rate()(step) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert TrainerOptions().decaying_over(4) == TrainerOptions()


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"name": "cosin"}, r"trainer\.schedule: unknown name 'cosin'\. Did you mean 'cosine'"),
        ({"name": "linear"}, r"trainer\.schedule 'linear': missing keyword decay_steps"),
        (
            {"name": "linear", "decay_steps": 5, "min_lr": 2},
            r"trainer\.schedule\.min_lr: expected at most trainer\.lr = 1",
        ),
        (
            {"name": "constant", "warmup_steps": -1},
            r"trainer\.schedule\.warmup_steps: expected a whole number from 0, found -1",
        ),
    ],
)
def test_a_wrong_schedule_or_an_endless_decay_is_a_config_error(schedule, message):
    with pytest.raises(ConfigError, match=message):
        rates(1, **schedule)


def test_a_schedule_of_others_is_found_by_its_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def halving(step, lr, every: int = 1):\n    return lr / 2 ** (step // every)\n"
    )
    assert rates(3, name=f"{tmp_path / 'mine.py'}:halving") == [1.0, 0.5, 0.25]
