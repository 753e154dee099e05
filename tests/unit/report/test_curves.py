"""What the pictures of a run draw, by hand."""

from __future__ import annotations

import pytest

from rlflow.report.curves import bars, drawn_score, headline, intervals, run_seconds, trailing_mean
from rlflow.report.metrics import Metric

REGISTERED = {"exact_match": Metric("share", "of tasks", score=True)}


def test_the_mean_looks_back_and_never_forward() -> None:
    rising = [0.0] * 19 + [1.0]
    assert trailing_mean(rising) == [0.0] * 19 + [0.5]  # a tenth of 20 steps: the last two
    assert trailing_mean([2.0] * 50) == pytest.approx([2.0] * 50)
    assert trailing_mean([1.0, 3.0]) == [1.0, 3.0] and trailing_mean([]) == []


def test_intervals_are_where_something_was_evaluated() -> None:
    records = [
        {"step": 0, "eval/a": 0.5, "eval/a_low": 0.4, "eval/a_high": 0.6},
        {"step": 1},
        {"step": 2, "eval/a": 0.7},
    ]
    assert intervals(records, "a") == [(0, 0.5, 0.4, 0.6), (2, 0.7, 0.7, 0.7)]


def test_phases_that_would_stand_there_as_0_percent_are_left_out() -> None:
    records = [
        {"step": step, "time/step_s": 10.0, "time/rollout_s": 9.0, "time/sync_s": 0.04, "time/update_s": 0.9}
        for step in (1, 2)
    ]
    drawn, shares = bars(records)
    assert shares == pytest.approx({"rollout": 0.9, "update": 0.09})
    assert [(bar.first, bar.last, bar.seconds["rollout"]) for bar in drawn] == [(1, 1, 9.0), (2, 2, 9.0)]


def test_many_steps_share_bars() -> None:
    drawn, _ = bars([{"step": step, "time/step_s": 1.0, "time/rollout_s": float(step % 2)} for step in range(1, 121)])
    assert len(drawn) == 60 and (drawn[0].first, drawn[-1].last) == (1, 120)
    assert {bar.seconds["rollout"] for bar in drawn} == {0.5}


def test_the_headline_is_in_words() -> None:
    evaluated = [{"step": 0, "eval/exact_match": 0.35}, {"step": 9, "train/reward": 0.5, "eval/exact_match": 0.886}]
    assert headline(evaluated, REGISTERED) == "exact match 89%, was 35%"
    assert headline(evaluated[:1], REGISTERED) == "exact match 35%"
    assert (
        headline([{"step": 1, "train/reward": -1.0}, {"step": 2, "train/reward": 2.5}], {})
        == "reward 2.50 in training, was -1.00"
    )
    assert headline([], REGISTERED) == "nothing measured yet"
    assert drawn_score(evaluated, {}) == "reward"


def test_one_clock_counts_the_run() -> None:
    records = [
        {"step": 0, "time/evaluate_s": 3.0, "time/run_s": 20.0},
        {"step": 1, "time/step_s": 5.0, "time/run_s": 26.0},
    ]
    assert run_seconds(records) == 26.0
    old = [{key: value for key, value in record.items() if key != "time/run_s"} for record in records]
    assert run_seconds(old) == 8.0, "of runs that wrote no clock: steps and evaluations"
