"""Charts draw whatever a run has, and say nothing that is not in the metrics."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rlflow_tools.view import charts
from rlflow_tools.view.charts import (
    CURVE_COLORS,
    PHASE_COLORS,
    Picture,
    comparison_svg,
    phase_shares,
    run_png,
    run_svg,
    trailing_mean,
)
from rlflow_tools.view.curves import curve, drawn_score, run_seconds
from rlflow_tools.view.page import picture, template

from rlflow.report.metrics import Metric, save_registered
from rlflow.report.sinks import MetricsLog, read_metrics
from tests.unit.tools.view.crafted import evaluated, trained

REGISTERED = {"exact_match": Metric("share", "of tasks", score=True)}
EVALUATION = {"eval/exact_match": 0.3, "eval/exact_match_low": 0.2, "eval/exact_match_high": 0.4}
TIMED = {
    "train/reward": 0.5,
    "train/exact_match": 0.4,
    "time/rollout_s": 1.0,
    "time/update_s": 2.0,
    "time/step_s": 3.5,
}
TEXT = "{http://www.w3.org/2000/svg}text"


def numbered(records: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{"step": step, **record} for step, record in enumerate(records)]


def texts(svg: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(svg).iter(TEXT)]


@pytest.mark.parametrize(
    "records",
    [
        [EVALUATION],
        [{"eval/reward": -3.0}, {"train/reward": -2.0}],
        [{"eval/exact_match": 0.3}, *[TIMED] * 300],
        [{}, {"train/reward": 0.5}],
        [{**EVALUATION, "eval/exact_match_high": float("inf")}, TIMED],
    ],
    ids=["start", "no exact match", "long", "no times", "an interval without an end"],
)
def test_any_stage_of_a_run_can_be_drawn(tmp_path: Path, records: list[dict[str, float]]) -> None:
    assert run_png(numbered(records), tmp_path / "p.png", "Title $x$", REGISTERED)
    content = (tmp_path / "p.png").read_bytes()
    assert [file.name for file in tmp_path.iterdir()] == ["p.png"]
    assert content[:8] == b"\x89PNG\r\n\x1a\n" and len(content) > 10_000
    drawn_texts = texts(run_svg(numbered(records), REGISTERED))
    assert any(text.startswith("step") for text in drawn_texts)


def test_nothing_to_draw_is_said_and_not_drawn(tmp_path: Path) -> None:
    assert not run_png(numbered([{"train/loss": 1.0}]), tmp_path / "p.png", "Title", {})
    assert not (tmp_path / "p.png").exists()


def test_the_picture_is_drawn_after_an_evaluation_and_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "progress.png"
    save_registered(tmp_path / "environment_metrics.json", REGISTERED)
    with MetricsLog(tmp_path, [Picture(tmp_path, "letters")]) as log:
        assert log.report_files() == {}, "nothing was measured"
        log.log(1, TIMED)
        assert not path.exists()
        log.log(1, EVALUATION)
        evaluated = path.read_bytes()
        log.log(2, TIMED)
        assert path.read_bytes() == evaluated
        assert log.report_files() == {"picture": path}
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert run_png(records, tmp_path / "expected.png", "letters", REGISTERED)
    assert path.read_bytes() == (tmp_path / "expected.png").read_bytes() != evaluated


def drawn(records: list[dict[str, float]]) -> list[Any]:
    """The axes of the chart of these records: learning, and time where some was measured."""
    with charts.figure(8, 6, size=9) as made:
        charts.draw_run(made, numbered(records), "exact_match")
        made.canvas.draw()
        return made.axes


def test_a_metric_with_a_chart_has_axes_between_learning_and_time() -> None:
    registered = {
        **REGISTERED,
        "calls": Metric("per episode", "of tools", chart=True),
        "search/hits": Metric("share", "of searches", chart=True),
        "plain": Metric("1", "in no chart"),
        "never": Metric("1", "not measured", chart=True),
    }
    steps = [{**TIMED, "rollout/calls": 2.0, "search/hits": 0.5, "rollout/plain": 7.0}] * 3
    records = numbered([EVALUATION, *steps])
    charted = charts.charted_metrics(records, registered)
    assert list(charted) == ["rollout/calls", "search/hits"]
    with charts.figure(8, 6, size=9) as made:
        charts.draw_run(made, records, "exact_match", charted)
        labels = [axes.get_ylabel() for axes in made.axes]
        (_, mean) = made.axes[1].lines
    assert labels[1:] == ["per episode", "share", "seconds per step"]
    assert mean.get_xydata().tolist() == [[1.0, 2.0], [2.0, 2.0], [3.0, 2.0]]
    on_page = texts(run_svg(records, registered))
    assert "calls (training) 2.00" in on_page and not any("plain" in one for one in on_page)


def test_steps_on_the_axis_are_whole_however_short_the_run() -> None:
    for last in (1, 2, 3, 7, 60):
        _, time = drawn([EVALUATION, *[TIMED] * last])
        assert all(float(tick).is_integer() for tick in time.get_xticks())


def test_an_interval_stands_at_its_evaluation_and_nowhere_between() -> None:
    learning, _ = drawn([EVALUATION, *[TIMED] * 5, {**TIMED, **EVALUATION}])
    (upright,) = learning.collections
    assert [path.tolist() for path in upright.get_segments()] == [
        [[0.0, 0.2], [0.0, 0.4]],
        [[6.0, 0.2], [6.0, 0.4]],
    ]


def test_a_color_has_one_meaning_and_what_is_0_percent_no_row() -> None:
    timed = {**TIMED, "time/sync_s": 0.001}
    learning, time = drawn([{"eval/exact_match": 0.3}, *[timed] * 9])
    assert {line.get_color() for line in learning.lines} == set(CURVE_COLORS.values())
    named = [text.get_text() for text in time.get_legend().get_texts()]
    assert named == ["update 57%", "rollout 29%"]
    colors = [*PHASE_COLORS.values(), *CURVE_COLORS.values()]
    assert len(set(colors)) == len(colors)


def test_names_of_curves_lie_beside_them_and_cover_nothing() -> None:
    records = numbered([EVALUATION, *[{**TIMED, "train/reward": 0.9}] * 9])
    with charts.figure(8.6, 5, size=9) as made:
        charts.draw_run(made, records, "exact_match")
        made.canvas.draw()
        boxes = [axes.get_window_extent() for axes in made.axes]
        legends = [axes.get_legend().get_window_extent() for axes in made.axes]
        axis = [axes.xaxis.get_tightbbox() for axes in made.axes]
        page = made.bbox
    assert not any(box.overlaps(legend) for box in [*boxes, *axis] for legend in legends)
    assert not legends[0].overlaps(legends[1])
    assert all(page.x0 <= one.x0 and one.x1 <= page.x1 for one in legends)
    assert all(page.y0 <= one.y0 and one.y1 <= page.y1 for one in legends)


def test_a_long_run_is_drawn_in_few_points() -> None:
    records = numbered(
        [{**TIMED, **(EVALUATION if step % 10 == 0 else {})} for step in range(2000)]
    )
    assert len(run_svg(records, REGISTERED)) < 200_000


def test_names_from_outside_are_text() -> None:
    name = "<script>alert(1)<b>\x1b\ud83d$x$"
    svg = run_svg(numbered([{f"eval/{name}": 0.5}, TIMED]), {name: Metric("share", "", score=True)})
    assert "<script" not in svg and "alert(1)" in svg
    ElementTree.fromstring(svg.encode())


# ---------------------------------------------------------------- what is drawn, by hand


def test_the_mean_looks_back_and_never_forward() -> None:
    rising = [0.0] * 19 + [1.0]
    assert trailing_mean(rising) == [0.0] * 19 + [0.5]  # a tenth of 20 steps: the last two
    assert trailing_mean([2.0] * 50) == pytest.approx([2.0] * 50)
    assert trailing_mean([1.0, 3.0]) == [1.0, 3.0] and trailing_mean([]) == []


def test_values_are_where_something_was_measured() -> None:
    first = {"step": 0, "eval/a": 0.5, "eval/a_low": 0.4, "eval/a_high": 0.6}
    records = [first, {"step": 1}, {"step": 2, "eval/a": 0.7}]
    found = [(one.step, one.value, one.low, one.high) for one in curve(records, "eval/a")]
    assert found == [(0, 0.5, 0.4, 0.6), (2, 0.7, None, None)]
    assert drawn_score([{"eval/exact_match": 1.0}], {}) == "reward"


def test_phases_that_would_stand_there_as_0_percent_are_left_out() -> None:
    step = {"time/step_s": 10.0, "time/rollout_s": 9.0, "time/sync_s": 0.04, "time/update_s": 0.9}
    assert phase_shares([step, step]) == pytest.approx({"rollout": 0.9, "update": 0.09})


def test_an_evaluation_is_no_part_of_the_steps_seconds() -> None:
    step = {"time/step_s": 100.0, "time/rollout_s": 60.0, "time/evaluate_s": 30.0}
    assert phase_shares([step]) == pytest.approx({"rollout": 60 / 130, "evaluate": 30 / 130})


def test_many_steps_share_bars_of_their_mean() -> None:
    slow = {"time/step_s": 3.0, "time/rollout_s": 3.0, "train/reward": 0.5}
    quick = {**slow, "time/step_s": 1.0, "time/rollout_s": 1.0}
    _, time = drawn([slow, quick] * 60)
    heights, edges, _ = time.patches[0].get_data()
    assert list(heights) == [2.0] * 60 and (edges[0], edges[-1]) == (-0.5, 119.5)


def test_one_clock_counts_the_run() -> None:
    records = [
        {"step": 0, "time/evaluate_s": 3.0, "time/run_s": 20.0},
        {"step": 1, "time/step_s": 5.0, "time/run_s": 26.0},
    ]
    assert run_seconds(records) == 26.0
    for record in records:
        del record["time/run_s"]
    assert run_seconds(records) == 8.0, "without a clock: steps and evaluations"


# ---------------------------------------------------------------- several runs


def dashes(svg: str) -> list[float]:
    lines = [
        one for one in svg.split("<path") if "stroke-dasharray: " in one and "clip-path" in one
    ]
    return [float(one.split("stroke-dasharray: ")[1].split(",")[0]) for one in lines]


def test_runs_that_coincide_are_all_seen_and_only_measured_intervals_drawn() -> None:
    """Each later one is drawn over the earlier ones in shorter dashes of the same period."""
    same = curve([trained(1, 0.1), trained(2, 0.4)], "train/exact_match")
    plain = comparison_svg({"a": same, "b": same, "c": same})
    long, short = dashes(plain)
    assert long == pytest.approx(2 * short) and "LineCollection" not in plain
    measured = curve([evaluated(0, 0.1), evaluated(5, 0.4)], "eval/exact_match")
    assert comparison_svg({"a": measured, "none": []}).count("LineCollection") == 1
    assert "_a 0.400" in comparison_svg({"_a": same})


def test_a_phone_gets_the_whole_chart_in_letters_that_can_be_read() -> None:
    """350 pixels beside the margins of a screen of 390: text of 9 points is of 10 pixels or more."""
    records = numbered([EVALUATION, *[TIMED] * 20, EVALUATION])
    point = curve(numbered([EVALUATION, EVALUATION]), "eval/exact_match")
    for draw in (
        lambda narrow: run_svg(records, REGISTERED, narrow=narrow),
        lambda narrow: comparison_svg({"first run": point, "second run": point}, narrow=narrow),
    ):
        wide, narrow = draw(False), draw(True)
        width = float(ElementTree.fromstring(narrow).attrib["viewBox"].split()[2])
        sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", narrow)]
        assert min(sizes) * 350 / width >= 10
        names = {text for text in texts(wide) if not re.fullmatch(r"[\d.]+", text)}
        assert names <= {*texts(narrow)}, "nothing is left out"


def test_pages_show_the_narrow_chart_on_a_narrow_screen() -> None:
    page = picture("<svg>wide</svg>", "<svg>narrow</svg>", "scores")
    media, small, large = re.findall(r'media="([^"]*)"|base64,([^"]*)"', page)
    assert media[0].startswith("(max-width: ")
    drawn = [base64.b64decode(one[1]).decode() for one in (small, large)]
    assert drawn == ["<svg>narrow</svg>", "<svg>wide</svg>"]
    for name in ("compare.html", "view.css"):
        assert "min-width: 700px" not in template(name)
