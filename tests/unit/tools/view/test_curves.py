"""A run's metrics over its steps, in a line."""

from __future__ import annotations

import math

from rlflow_tools.view.curves import headline, sparkline

from rlflow.report.metrics import Metric

REGISTERED = {"exact_match": Metric("share", "of tasks", score=True)}


def test_sparklines_scale_to_their_range_and_average_to_their_width() -> None:
    assert sparkline([0, 7], 40) == "▁█"
    assert sparkline([0, 0, 4, 4, 8, 8], 3) == "▁▅█"
    assert sparkline([1.0]) == "" and sparkline([math.nan, math.nan]) == ""
    assert len(set(sparkline([2.0] * 5))) == 1
    assert len(sparkline(list(range(1000)))) == 40


def test_the_headline_is_in_words() -> None:
    evaluated = [{"step": 0, "eval/exact_match": 0.35}, {"step": 9, "eval/exact_match": 0.886}]
    assert headline(evaluated, REGISTERED) == "exact match 89%, was 35%"
    assert headline(evaluated[:1], REGISTERED) == "exact match 35%"
    trained = [{"step": 1, "train/reward": -1.0}, {"step": 2, "train/reward": 2.5}]
    assert headline(trained, {}) == "reward 2.50 in training, was -1.00"
    assert headline([], REGISTERED) == "nothing measured yet"


def test_the_headline_does_not_compare_evaluations_of_other_tasks() -> None:
    few, lost, whole = (
        {"eval/reward": 0.5, "eval/attempts": made, "eval/failed": failed}
        for made, failed in ((16.0, 0.0), (15.0, 1.0), (64.0, 0.0))
    )
    assert headline([few, whole], {}) == "reward 0.50, was 0.50 of other tasks"
    assert headline([few, lost], {}) == "reward 0.50, was 0.50"
