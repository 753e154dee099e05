"""Claims about values from judged progress: the spec's figures, and ranks by hand."""

from __future__ import annotations

import pytest

from rlflow_environments.wrappers.progress_values import (
    negative_rate,
    next_value,
    pair_label,
    value_order_correlation,
    values,
)


def test_labels_of_pairs() -> None:
    assert [
        pair_label(0, 10, 100),
        pair_label(50, 100, 100),
        pair_label(20, 10, 100),
    ] == pytest.approx([0.1, 1.0, -0.125])
    assert pair_label(100, 90, 100) is None and pair_label(30, 30, 100) == 0.0


def test_values_follow_the_progress() -> None:
    deltas = [0.2, 0.5, -0.25, 0.5]
    assert values(deltas) == pytest.approx([0.2, 0.6, 0.5, 0.75], abs=1e-6)
    assert values([0.2, 0.5]) == pytest.approx([0.2, 0.6], abs=1e-6)
    assert negative_rate(deltas) == 0.25 and negative_rate([]) == 0.0


def test_the_labels_of_a_trajectory_give_the_share_of_its_work_back() -> None:
    labels = [pair_label(frame, frame + 1, 8) or 0.0 for frame in range(8)]
    assert values(labels) == pytest.approx([frame / 8 for frame in range(1, 9)], abs=1e-6)


@pytest.mark.parametrize(
    ("value", "delta", "paper", "mix_f"),
    [
        (0.6, -0.25, 0.5, 0.4666666667),
        (0.4, -0.25, 0.25, 0.3),
        (0.9, -0.95, -0.0 + 0.9 - 0.095, 0.1),
        (0.9, -1.0, 0.8, 0.1),
        (0.6, 0.25, 0.7, 0.7),
        (1.0, -0.5, 1.0, 0.98),
    ],
)
def test_a_step_back_by_either_rule(value: float, delta: float, paper: float, mix_f: float) -> None:
    assert next_value(value, delta) == pytest.approx(paper, abs=1e-6)
    assert next_value(value, delta, "mix_f") == pytest.approx(mix_f, abs=1e-6)


@pytest.mark.parametrize(
    ("found", "correlation"),
    [
        ([0.2, 0.6, 0.5, 0.75], 0.8),
        ([0.0, 0.2, 0.6, 0.5, 0.75], 0.9),
        ([1, 2, 3], 1.0),
        ([3, 2, 1], -1.0),
        ([0.5, 0.5, 0.5], 0.0),
        ([1, 1, 2], 1.5 / 3**0.5),  # ranks .5 .5 2: joint 1.5, squares 1.5 and 2
        ([4], 0.0),
        ([], 0.0),
    ],
)
def test_the_order_of_values_against_time(found: list[float], correlation: float) -> None:
    assert value_order_correlation(found) == pytest.approx(correlation, abs=1e-6)
