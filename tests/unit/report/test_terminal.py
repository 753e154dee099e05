"""The progress of a run in the terminal."""

from __future__ import annotations

import io
import re

import pytest

from rlflow.errors import command
from rlflow.report.lines import (
    clock,
    evaluation_line,
    next_commands,
    numbers,
    phase_times,
    span,
    summary_text,
)
from rlflow.report.metrics import Metric
from rlflow.report.terminal import Progress
from rlflow.report.timer import Clock

REGISTERED = {
    "exact_match": Metric("share", "of tasks", score=True, shown="EM {:.3f}"),
    "f1": Metric("share", "mean F1", score=True),
    "calls": Metric("per episode", "calls of a tool", shown="calls {:.1f}"),
    "hops": Metric("count", "not shown"),
    "tool/calls": Metric("count", "of the whole step, and shown nowhere"),
}
STEP = {"train/reward": 0.5, "train/exact_match": 0.25, "speed/tokens_per_s": 12345.0, "time/rollout_s": 1.2,
        "time/update_s": 0.8, "time/sync_s": 0.01, "time/step_s": 2.0, "rollout/aborted": 0.25}  # fmt: skip
EVALUATION = {
    "eval/exact_match": 0.4,
    "eval/exact_match_low": 0.3,
    "eval/exact_match_high": 0.5,
    "eval/failed": 2.0,
}
SUMMARY = {"status": "finished", "steps": 20, "seconds": 125.0, "first_evaluation": EVALUATION, "first_evaluation_step": 0,
           "last_evaluation": EVALUATION, "last_evaluation_step": 20,
           "export_logprob_difference": 2e-6, "written": {"run": "runs/a", "export": "runs/a/export"}}  # fmt: skip


@pytest.fixture(autouse=True)
def no_width_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


def test_a_pipe_gets_one_line_per_step_and_per_evaluation() -> None:
    stream = io.StringIO()
    progress = Progress("auto", steps=20, title="demo", stream=stream)
    progress.registered = REGISTERED
    progress.phase("rollout")
    progress.evaluated(0, EVALUATION)
    progress.step(10, STEP)
    progress.finished(SUMMARY)
    progress.close()
    title, *lines = stream.getvalue().splitlines()
    assert title == "demo"
    evaluated, step = (line for line in lines if line.startswith(("eval", "step")))
    end = lines[lines.index(step) + 1 :]
    assert evaluated == "eval  0/20  EM 0.400 [0.300, 0.500]  2 FAILED"
    assert step == "step 10/20  reward 0.500  EM 0.250  ABORTED 25%  2.0 s  ETA 20 s"
    assert end[0] == "finished after 20 steps and 2:05"
    assert next(line for line in end if "export" in line).split() == [
        "export", "runs/a/export", "(log-probs", "differ", "by", "up", "to", "2.0e-06)"]  # fmt: skip


def test_a_terminal_gets_these_lines_above_one_that_is_redrawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    progress = Progress(
        "auto", steps=20, title="demo", first_step=3, stream=stream, clock=Clock(before_s=600.0)
    )
    progress.registered = REGISTERED
    assert progress.status().startswith("3 of 20  ·  10:00  ·  starting")
    progress.step(4, STEP)
    progress.phase("rollout")
    progress.episode(3, 8, None)
    progress.message("[not markup]")
    assert progress._live is not None
    progress._live.refresh()
    assert "4 of 20  ·  10:00  ·  ETA 32 s  ·  rollout 3/8" in stream.getvalue()
    progress.finished(SUMMARY)
    progress.close()
    lines = stream.getvalue().splitlines()
    assert any("step  4/20  reward 0.500  EM 0.250" in line for line in lines), lines
    assert any("[not markup]" in line for line in lines) and lines[-1].startswith(
        f"  {command()} eval"
    ), lines


FULL_STEP = {**STEP, "train/reward": 0.25, "train/entropy": 0.36, "train/logprob_gap": 2.5e-7, "train/gradient_norm": 0.36, "rollout/aborted": 0.0,
             "rollout/calls": 0.8, "rollout/truncated_max_tokens": 0.05, "time/score_s": 0.6}  # fmt: skip
FULL_EVALUATION = {**EVALUATION, "eval/f1": 0.367, "eval/calls": 1.0, "eval/turns": 2.0, "eval/questions": 400.0,
                   "eval/reward": 0.4, "eval/reward_low": 0.35, "eval/reward_high": 0.45}  # fmt: skip


def shown_by(registered: dict[str, Metric], caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines of a run of six steps, evaluated every second one."""
    stream = io.StringIO()
    progress = Progress("plain", steps=60, stream=stream)
    progress.registered = registered
    with caplog.at_level("INFO", logger="rlflow"):
        for step in range(7):
            if step:
                progress.step(step, FULL_STEP)
            if step % 2 == 0:
                progress.evaluated(step, FULL_EVALUATION)
    progress.finished({**SUMMARY, "first_evaluation": FULL_EVALUATION, "written": {}})
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("registered", [REGISTERED, {}], ids=["search", "own"])
def test_a_step_is_one_line_of_80_columns_with_no_number_twice_and_words_are_explained_once(
    registered: dict[str, Metric], caplog: pytest.LogCaptureFixture
) -> None:
    lines = shown_by(registered, caplog)
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 6 and all("entropy 0.36" in line for line in steps)
    for line in steps:
        values = re.findall(r"(?<![\d.])0\.25\d*", line)
        assert len(values) == 1, line  # the reward is the score here
    text = " ".join(" ".join(lines).split())
    score = "EM" if registered else "reward"
    for word in (score, "[low, high]", "entropy", "ETA"):
        assert text.count(f"{word}: ") == 1, word
    assert ("calls: calls of a tool per episode" in text) == bool(registered)
    assert "shown nowhere" not in text, "another metric whose label is the same word"
    assert not re.search(r"\bgap [\d.]", text) or text.count("gap: ") == 1
    logged = [record.message for record in caplog.records if record.message.startswith("step")]
    assert "gap 2.5e-07" in logged[0] and "= 2.0 s" in logged[0], "the log has every number"


def test_a_wide_terminal_shows_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    stream = io.StringIO()
    progress = Progress("plain", steps=60, stream=stream)
    progress.step(1, FULL_STEP)
    assert "gap 2.5e-07" in stream.getvalue() and "tokens/s" in stream.getvalue()


def test_the_remaining_time_counts_evaluations_at_their_own_pace() -> None:
    progress = Progress(steps=10)
    progress.tasks_after = lambda step: 40 * (10 - step)
    # 5 episodes of a step in 2 s: 0.4 s a task, before any evaluation was timed
    progress.step(1, {"time/step_s": 3.0, "time/rollout_s": 2.0, "rollout/episodes": 5.0})
    assert progress.remaining_s == pytest.approx(9 * 3.0 + 9 * 40 * 0.4)
    progress.evaluated(1, {"time/evaluate_s": 8.0, "eval/questions": 40.0, "eval/reward": 0.0})
    assert progress.remaining_s == pytest.approx(9 * 3.0 + 9 * 40 * 0.2)
    progress.step(10, {"time/step_s": 3.0})
    assert progress.remaining_s == 0


def test_none_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("none", steps=3)
    progress.step(1, STEP)
    progress.finished(SUMMARY)
    assert capsys.readouterr() == ("", "")


def test_remaining_time_follows_the_last_steps_and_counts_from_where_a_run_resumed() -> None:
    progress = Progress(steps=100, first_step=90)
    assert progress.remaining_s is None
    progress.step(91, {"time/step_s": 100.0})
    assert progress.remaining_s == 900.0
    for step in range(92, 100):
        progress.step(step, {"time/step_s": 2.0})
    assert progress.remaining_s == 2.0  # the slow first step has left the window


def test_an_interrupted_run_says_how_to_go_on() -> None:
    text = summary_text(
        {
            "status": "interrupted by SIGINT",
            "steps": 1,
            "seconds": 3.0,
            "written": {"run": "my runs/r"},
        },
        {},
    )
    assert text.splitlines()[0] == "interrupted by SIGINT after 1 step and 3 s"
    assert f"  {command()} train --config 'my runs/r'/config.yaml --resume  # goes on" in text


def test_what_an_environment_registered_stands_in_the_lines_and_nothing_else_of_it() -> None:
    step = {
        **STEP,
        "train/f1": 0.3,
        "rollout/calls": 2.0,
        "rollout/hops": 3.0,
        "train/logprob_gap": 1e-5,
    }
    assert numbers(step, REGISTERED) == [
        "reward 0.500", "EM 0.250", "ABORTED 25%", "calls 2.0", "gap 1.0e-05", "12,345 tokens/s"]  # fmt: skip
    assert numbers(step, {}) == ["reward 0.500", "ABORTED 25%", "gap 1.0e-05", "12,345 tokens/s"]
    values = {
        **EVALUATION,
        "eval/f1": 0.45,
        "eval/calls": 1.5,
        "eval/hops": 2.0,
        "eval/turns": 2.5,
        "eval/questions": 8.0,
    }
    line = evaluation_line(values, REGISTERED)
    assert line == "EM 0.400 [0.300, 0.500]  f1 0.450  2 FAILED  8 tasks  calls 1.5  turns 2.50"


def test_evaluations_of_other_tasks_do_not_stand_side_by_side_as_if_they_were_of_the_same() -> None:
    """`evaluation.questions` says how many a scheduled evaluation takes; the last one takes all."""
    few, lost, all_of_them = ({"eval/reward": 0.5, "eval/attempts": made, "eval/failed": failed}
                              for made, failed in ((16.0, 0.0), (15.0, 1.0), (64.0, 0.0)))  # fmt: skip
    for last, note in (
        (all_of_them, "  (other tasks than the first evaluation's)"),
        (few, ""),
        (lost, "  1 FAILED"),
    ):
        summary = {**SUMMARY, "first_evaluation": few, "last_evaluation": last}
        before, after = summary_text(summary, {}).splitlines()[1:3]
        assert before == "  before  reward 0.500" and after == f"  after   reward 0.500{note}"


def test_times_read_as_people_write_them() -> None:
    assert [span(seconds) for seconds in (-1, 59.4, 59.6, 200, 7500, 86399, 926423)] == [
        "0 s",
        "59 s",
        "1 min 00 s",
        "3 min 20 s",
        "2 h 05 min",
        "1 d 0 h",
        "10 d 17 h",
    ]
    assert [clock(seconds) for seconds in (-1, 4.4, 59.6, 185, 7385, 93785)] == [
        "0 s", "4 s", "1:00", "3:05", "2:03:05", "1 day, 2:03:05"]  # fmt: skip
    assert (
        phase_times({}) == ""
        and evaluation_line({"eval/reward": 1.0}, REGISTERED) == "reward 1.000"
    )


def evaluations(first: int, last: int, steps: int, status: str = "finished") -> list[str]:
    """The lines of a summary that are about evaluations, whose reward is their step."""
    summary = {"status": status, "steps": steps, "seconds": 1.0, "written": {}, "first_evaluation_step": first,
               "last_evaluation_step": last, "first_evaluation": {"eval/reward": float(first)} if first >= 0 else {},
               "last_evaluation": {"eval/reward": float(last)} if last >= 0 else {}}  # fmt: skip
    return [line.strip() for line in summary_text(summary, {}).splitlines()[1:]]


def test_an_evaluation_is_called_after_the_training_only_if_it_was_made_then() -> None:
    assert evaluations(0, 20, 20) == ["before  reward 0.000", "after   reward 20.000"]
    interrupted = evaluations(0, 0, 7, "interrupted by SIGINT")
    assert interrupted == ["before  reward 0.000"], "step 0 is not what came of 7 steps"
    assert evaluations(0, 5, 7) == ["before     reward 0.000", "at step 5  reward 5.000"]
    assert evaluations(20, 20, 20) == ["after  reward 20.000"], (
        "without an evaluation at the start there is no before"
    )
    assert evaluations(5, 20, 20) == ["at step 5  reward 5.000", "after      reward 20.000"]
    assert evaluations(-1, -1, 3) == []


def test_the_next_commands_are_those_that_can_be_given() -> None:
    given = [
        f"{command()} {words}"
        for words in ("view runs/a --open", "show runs/a", "eval --model runs/a/export")
    ]
    assert [line for line, _ in next_commands({**SUMMARY, "takes_questions": False})] == given
    asked = [line for line, _ in next_commands({**SUMMARY, "takes_questions": True})]
    assert asked == [f"{command()} ask runs/a", *given], (
        "only where the environment makes a task of text"
    )
    assert next_commands({**SUMMARY, "written": {}}) == []
    assert summary_text(SUMMARY, REGISTERED).splitlines()[-4] == "next"
