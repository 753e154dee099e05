"""The picture draws whatever a run has, and says nothing that is not in the metrics."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from rlflow.report import charts as picture
from rlflow.report.charts import _label_ends, render_picture
from rlflow.report.curves import PHASE_COLORS
from rlflow.report.metrics import Metric
from rlflow.report.sinks import MetricsLog

pytest.importorskip("matplotlib")


def log(directory: Path, records: list[dict[str, float]]) -> Path:
    with MetricsLog(directory) as metrics:
        for step, record in enumerate(records):
            metrics.log(step, record)
    return directory / "metrics.jsonl"


REGISTERED = {"exact_match": Metric("share", "of tasks", score=True)}
TIMED = {"train/reward": 0.5, "train/exact_match": 0.4, "time/rollout_s": 1.0, "time/update_s": 2.0, "time/step_s": 3.5}


@pytest.mark.parametrize(
    "records",
    [
        [{"eval/exact_match": 0.3, "eval/exact_match_low": 0.2, "eval/exact_match_high": 0.4}],
        [{"eval/reward": -3.0}, {"train/reward": -2.0}],
        [{"eval/exact_match": 0.3}, *[TIMED] * 300],
        [{}, {"train/reward": 0.5}],
    ],
    ids=["start", "no exact match", "long", "no times"],
)
def test_any_stage_of_a_run_can_be_drawn(tmp_path: Path, records: list[dict[str, float]]) -> None:
    assert render_picture(log(tmp_path, records), tmp_path / "p.png", "Title", REGISTERED)
    content = (tmp_path / "p.png").read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["metrics.jsonl", "p.png"]
    assert content[:8] == b"\x89PNG\r\n\x1a\n" and len(content) > 10_000


def test_nothing_to_draw_is_said_and_not_drawn(tmp_path: Path) -> None:
    assert not render_picture(log(tmp_path, [{"train/loss": 1.0}]), tmp_path / "p.png")
    assert not (tmp_path / "p.png").exists()


def drawn(records: list[dict[str, float]]) -> list[Any]:
    """The axes of the picture of these records: learning, and time where some was measured."""
    from matplotlib.figure import Figure

    figure = Figure()
    axes = figure.subplots(2)
    records = [{"step": step, **record} for step, record in enumerate(records)]
    picture._draw_learning(axes[0], records, "exact_match")
    picture._draw_time(axes[1], records)
    return list(axes)


def test_steps_on_the_axis_are_whole_however_short_the_run() -> None:
    for last in (1, 2, 3, 7, 60):
        learning, _ = drawn([{"eval/exact_match": 0.3}, *[TIMED] * last])
        assert all(float(tick).is_integer() for tick in learning.get_xticks())


def test_an_interval_stands_at_its_evaluation_and_nowhere_between() -> None:
    evaluation = {"eval/exact_match": 0.3, "eval/exact_match_low": 0.2, "eval/exact_match_high": 0.4}
    learning, _ = drawn([evaluation, *[TIMED] * 5, {**TIMED, **evaluation}])
    assert not learning.collections, "no band"
    upright = [line.get_xydata().tolist() for line in learning.lines if len(set(line.get_xdata())) == 1]
    assert upright == [[[0.0, 0.2], [0.0, 0.4]], [[6.0, 0.2], [6.0, 0.4]]]


def test_a_colour_has_one_meaning_and_what_is_0_percent_no_row() -> None:
    learning, time = drawn([{"eval/exact_match": 0.3}, *[{**TIMED, "time/sync_s": 0.001}] * 9])
    curves = {line.get_color() for line in learning.lines}
    assert len(curves) == 3 and not curves & set(PHASE_COLORS.values())
    assert [text.get_text() for text in time.texts if text.get_text() != "■"] == ["update  57%", "rollout  29%"]
    assert len(set(PHASE_COLORS.values())) == len(PHASE_COLORS)


def test_labels_do_not_overlap_and_stay_inside() -> None:
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    axes.set_ylim(0, 1)
    _label_ends(axes, [(0.99, "a", "k"), (0.98, "b\nb", "k"), (0.985, "c", "k")])
    heights = sorted(text.xy[1] for text in axes.texts)
    assert heights[-1] < 1.0 and all(upper - lower > 0.05 for lower, upper in itertools.pairwise(heights))
