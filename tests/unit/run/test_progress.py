"""What is shown while a run goes on."""

from __future__ import annotations

import io
import math

import pytest

from rlflow.errors import ConfigError
from rlflow.metrics.names import Metric
from rlflow.run.progress import (
    Pace,
    RichProgress,
    clock,
    evaluation_line,
    headline,
    make_progress,
    phase_seconds,
    sparkline,
    summary_text,
)

REGISTERED = {
    "exact_match": Metric("share", "of tasks", score=True, shown="EM {:.3f}"),
    "f1": Metric("share", "mean F1", score=True),
    "calls": Metric("per episode", "calls of a tool", shown="calls {:.1f}"),
    "hops": Metric("count", "not shown"),
}
STEP = {"train/reward": 0.5, "train/exact_match": 0.25, "speed/tokens_per_s": 12345.0, "time/rollout_s": 1.2,
        "time/update_s": 0.8, "time/sync_s": 0.01, "time/step_s": 2.0, "rollout/aborted": 0.25}  # fmt: skip
EVALUATION = {"eval/exact_match": 0.4, "eval/exact_match_low": 0.3, "eval/exact_match_high": 0.5, "eval/failed": 2.0}
SUMMARY = {"status": "finished", "steps": 20, "seconds": 125.0, "first_evaluation": EVALUATION, "last_evaluation": EVALUATION,
           "export_logprob_difference": 2e-6, "written": {"run": "runs/a", "export": "runs/a/export"}}  # fmt: skip


def test_a_pipe_gets_one_line_per_step_and_per_evaluation() -> None:
    stream = io.StringIO()
    progress = make_progress("auto", steps=20, title="demo", stream=stream)
    progress.registered = REGISTERED
    progress.phase("rollout")
    progress.evaluated(0, EVALUATION)
    progress.step(10, STEP)
    progress.finished(SUMMARY)
    progress.close()
    title, evaluated, step, *end = stream.getvalue().splitlines()
    assert title == "demo"
    assert evaluated == "eval  0/20  EM 0.400 [0.300, 0.500]  2 FAILED"
    assert step == ("step 10/20  reward 0.500  EM 0.250  12,345 tokens/s  ABORTED 25%  "
                    "rollout 1.2 + update 0.8 = 2.0 s  ETA 20 s")  # fmt: skip
    assert end[0] == "finished after 20 steps and 2:05"
    assert end[-1].split() == ["export", "runs/a/export", "(log-probs", "within", "2e-06", "of", "the", "trainer's)"]


def test_the_panel_shows_score_curve_time_and_evaluation() -> None:
    stream = io.StringIO()
    progress = make_progress("rich", steps=20, title="demo", stream=stream)
    assert isinstance(progress, RichProgress)
    progress.registered = REGISTERED
    for step in range(1, 5):
        progress.step(step, {**STEP, "train/reward": step / 10})
    progress.evaluated(4, EVALUATION)
    progress.message("[not markup]")
    progress.finished(SUMMARY)
    progress.close()
    text = stream.getvalue()
    for shown in (
        "4 of 20",
        "0.400  ▁▃▆█",
        "exact match",
        "rollout 1.2 + update 0.8 = 2.0 s",
        "EM 0.400 [0.300, 0.500]",
        "[not markup]",
        "finished",
    ):
        assert shown in text, text


def test_none_is_silent_and_an_unknown_kind_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    progress = make_progress("none", steps=3)
    progress.step(1, STEP)
    progress.finished(SUMMARY)
    assert capsys.readouterr() == ("", "")
    with pytest.raises(ConfigError, match="Did you mean 'plain'"):
        make_progress("plan", steps=3)


def test_remaining_time_follows_the_last_steps_and_counts_from_where_a_run_resumed() -> None:
    pace = Pace(steps=100, first_step=90)
    assert pace.remaining_s is None
    pace.step(91, {"time/step_s": 100.0})
    assert pace.remaining_s == 900.0
    for step in range(92, 100):
        pace.step(step, {"time/step_s": 2.0})
    assert pace.remaining_s == 2.0  # the slow first step has left the window


def test_the_panel_of_a_resumed_run_starts_where_the_run_did() -> None:
    stream = io.StringIO()
    progress = make_progress("rich", steps=100, first_step=90, stream=stream)
    assert isinstance(progress, RichProgress)
    assert dict(progress._lines())["step"].startswith("90 of 100")
    progress.step(91, {"time/step_s": 20.0})
    assert "ETA 3:00" in dict(progress._lines())["step"]
    progress.close()


def test_an_interrupted_run_says_how_to_go_on() -> None:
    text = summary_text({"status": "interrupted by SIGINT", "steps": 1, "seconds": 3.0, "written": {"run": "r"}}, {})
    assert text.splitlines()[0] == "interrupted by SIGINT after 1 step and 3 s; --resume continues the run"


def test_sparklines_scale_to_their_range_and_average_to_their_width() -> None:
    assert sparkline([0, 7], 40) == "▁█"
    assert sparkline([0, 0, 4, 4, 8, 8], 3) == "▁▅█"
    assert sparkline([1.0]) == "" and sparkline([math.nan, math.nan]) == ""
    assert len(set(sparkline([2.0] * 5))) == 1
    assert len(sparkline(list(range(1000)))) == 40


def test_what_an_environment_registered_stands_in_the_lines_and_nothing_else_of_it() -> None:
    step = {**STEP, "train/f1": 0.3, "rollout/calls": 2.0, "rollout/hops": 3.0, "train/logprob_gap": 1e-5}
    assert headline(step, REGISTERED) == [
        "reward 0.500", "EM 0.250", "12,345 tokens/s", "calls 2.0", "gap 1.0e-05", "ABORTED 25%"]  # fmt: skip
    assert headline(step, {}) == ["reward 0.500", "12,345 tokens/s", "gap 1.0e-05", "ABORTED 25%"]
    values = {**EVALUATION, "eval/f1": 0.45, "eval/calls": 1.5, "eval/hops": 2.0, "eval/turns": 2.5, "eval/questions": 8.0}
    line = evaluation_line(values, REGISTERED)
    assert line == "EM 0.400 [0.300, 0.500]  f1 0.450  calls 1.5  turns 2.50  8 tasks  2 FAILED"


def test_times_read_as_people_write_them() -> None:
    assert [clock(seconds) for seconds in (-1, 4.4, 59.6, 185, 7385)] == ["0 s", "4 s", "1:00", "3:05", "2:03:05"]
    assert phase_seconds({}) == "" and evaluation_line({"eval/reward": 1.0}, REGISTERED) == "reward 1.000"
