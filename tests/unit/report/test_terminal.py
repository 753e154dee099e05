"""What is shown while a run goes on."""

from __future__ import annotations

import contextlib
import io
import math
import os
import pty
import sys

import pytest

from rlflow.errors import ConfigError, command
from rlflow.report.lines import (
    clock,
    evaluation_line,
    headline,
    next_commands,
    numbers,
    phase_seconds,
    sparkline,
    summary_text,
)
from rlflow.report.metrics import Metric
from rlflow.report.terminal import Progress, hidden_control_keys
from rlflow.report.timer import Clock
from rlflow.types import StopReason, Trajectory, Turn

REGISTERED = {
    "exact_match": Metric("share", "of tasks", score=True, shown="EM {:.3f}"),
    "f1": Metric("share", "mean F1", score=True),
    "calls": Metric("per episode", "calls of a tool", shown="calls {:.1f}"),
    "hops": Metric("count", "not shown"),
}
STEP = {"train/reward": 0.5, "train/exact_match": 0.25, "speed/tokens_per_s": 12345.0, "time/rollout_s": 1.2,
        "time/update_s": 0.8, "time/sync_s": 0.01, "time/step_s": 2.0, "rollout/aborted": 0.25}  # fmt: skip
EVALUATION = {"eval/exact_match": 0.4, "eval/exact_match_low": 0.3, "eval/exact_match_high": 0.5, "eval/failed": 2.0}
SUMMARY = {"status": "finished", "steps": 20, "seconds": 125.0, "first_evaluation": EVALUATION, "first_evaluation_step": 0,
           "last_evaluation": EVALUATION, "last_evaluation_step": 20,
           "export_logprob_difference": 2e-6, "written": {"run": "runs/a", "export": "runs/a/export"}}  # fmt: skip


def test_a_pipe_gets_one_line_per_step_and_per_evaluation() -> None:
    stream = io.StringIO()
    progress = Progress("auto", steps=20, title="demo", stream=stream)
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
    assert next(line for line in end if "export" in line).split() == [
        "export", "runs/a/export", "(log-probs", "differ", "by", "up", "to", "2.0e-06)"]  # fmt: skip


def test_the_panel_shows_score_curve_time_and_evaluation() -> None:
    stream = io.StringIO()
    progress = Progress("rich", steps=20, title="demo", stream=stream)
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
    progress = Progress("none", steps=3)
    progress.step(1, STEP)
    progress.finished(SUMMARY)
    assert capsys.readouterr() == ("", "")
    with pytest.raises(ConfigError, match="Did you mean 'plain'"):
        Progress("plan", steps=3)


def test_remaining_time_follows_the_last_steps_and_counts_from_where_a_run_resumed() -> None:
    progress = Progress(steps=100, first_step=90)
    assert progress.remaining_s is None
    progress.step(91, {"time/step_s": 100.0})
    assert progress.remaining_s == 900.0
    for step in range(92, 100):
        progress.step(step, {"time/step_s": 2.0})
    assert progress.remaining_s == 2.0  # the slow first step has left the window


def test_the_panel_of_a_resumed_run_starts_where_the_run_did() -> None:
    stream = io.StringIO()
    progress = Progress("rich", steps=100, first_step=90, stream=stream)
    assert dict(progress.rows())["step"].startswith("90 of 100")
    progress.step(91, {"time/step_s": 20.0})
    assert "ETA 3:00" in dict(progress.rows())["step"]
    progress.close()


def test_an_interrupted_run_says_how_to_go_on() -> None:
    text = summary_text({"status": "interrupted by SIGINT", "steps": 1, "seconds": 3.0, "written": {"run": "my runs/r"}}, {})
    assert text.splitlines()[0] == "interrupted by SIGINT after 1 step and 3 s"
    assert f"  {command()} train --config 'my runs/r'/config.yaml --resume  # goes on" in text


def test_sparklines_scale_to_their_range_and_average_to_their_width() -> None:
    assert sparkline([0, 7], 40) == "▁█"
    assert sparkline([0, 0, 4, 4, 8, 8], 3) == "▁▅█"
    assert sparkline([1.0]) == "" and sparkline([math.nan, math.nan]) == ""
    assert len(set(sparkline([2.0] * 5))) == 1
    assert len(sparkline(list(range(1000)))) == 40


def test_what_an_environment_registered_stands_in_the_lines_and_nothing_else_of_it() -> None:
    step = {**STEP, "train/f1": 0.3, "rollout/calls": 2.0, "rollout/hops": 3.0, "train/logprob_gap": 1e-5}
    assert numbers(step, REGISTERED) == [
        "reward 0.500", "EM 0.250", "12,345 tokens/s", "calls 2.0", "gap 1.0e-05", "ABORTED 25%"]  # fmt: skip
    assert numbers(step, {}) == ["reward 0.500", "12,345 tokens/s", "gap 1.0e-05", "ABORTED 25%"]
    values = {**EVALUATION, "eval/f1": 0.45, "eval/calls": 1.5, "eval/hops": 2.0, "eval/turns": 2.5, "eval/questions": 8.0}
    line = evaluation_line(values, REGISTERED)
    assert line == "EM 0.400 [0.300, 0.500]  f1 0.450  calls 1.5  turns 2.50  8 tasks  2 FAILED"


def test_the_headline_is_in_words() -> None:
    evaluated = [{"step": 0, "eval/exact_match": 0.35}, {"step": 9, "eval/exact_match": 0.886}]
    assert headline(evaluated, REGISTERED) == "exact match 89%, was 35%"
    assert headline(evaluated[:1], REGISTERED) == "exact match 35%"
    trained = [{"step": 1, "train/reward": -1.0}, {"step": 2, "train/reward": 2.5}]
    assert headline(trained, {}) == "reward 2.50 in training, was -1.00"
    assert headline([], REGISTERED) == "nothing measured yet"


def test_times_read_as_people_write_them() -> None:
    assert [clock(seconds) for seconds in (-1, 4.4, 59.6, 185, 7385)] == ["0 s", "4 s", "1:00", "3:05", "2:03:05"]
    assert phase_seconds({}) == "" and evaluation_line({"eval/reward": 1.0}, REGISTERED) == "reward 1.000"


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
    assert evaluations(20, 20, 20) == ["after  reward 20.000"], "without an evaluation at the start there is no before"
    assert evaluations(5, 20, 20) == ["at step 5  reward 5.000", "after      reward 20.000"]
    assert evaluations(-1, -1, 3) == []


def test_the_next_commands_are_those_that_can_be_given() -> None:
    given = [f"{command()} {words}" for words in ("view runs/a --open", "show runs/a", "eval --model runs/a/export")]
    assert [line for line, _ in next_commands({**SUMMARY, "takes_questions": False})] == given
    asked = [line for line, _ in next_commands({**SUMMARY, "takes_questions": True})]
    assert asked == [f"{command()} ask runs/a", *given], "only where the environment makes a task of text"
    assert next_commands({**SUMMARY, "written": {}}) == []
    assert summary_text(SUMMARY, REGISTERED).splitlines()[-4] == "next"


def episode(response: str) -> Trajectory:
    turns = [Turn(0, 0, 1, 0.0, 1.0, "first", "look\nhere"), Turn(0, 1, 2, 1.0, 1.0, response, "")]
    return Trajectory("t", "g", [], turns, 1.0, StopReason.TERMINATED, prompt="What is it?")


def panel_text(width: int, **changes: object) -> str:
    """The panel as it stands on a terminal of that width."""
    from rich.console import Console

    progress = Progress("rich", steps=20, title="demo", stream=io.StringIO())
    progress.registered = REGISTERED
    progress.phase("evaluate")
    progress.episode(120, 400, episode("It is\x1b[2J a very long answer " + "that goes on " * 40))
    many = {"rollout/calls": 2.0, "train/logprob_gap": 1e-5, "train/entropy": 0.42, "train/gradient_norm": 0.61}
    progress.step(4, {**STEP, **many, "rollout/truncated_max_tokens": 0.125})
    progress.evaluated(0, {**EVALUATION, "eval/f1": 0.45, "eval/turns": 2.0, "eval/questions": 400.0})
    stream = io.StringIO()
    assert progress._panel is not None
    progress._panel.console = Console(file=stream, width=width)
    progress._panel.console.print(progress._panel.drawn())
    progress.close()
    return stream.getvalue()


@pytest.mark.parametrize("width", [80, 200])
def test_the_panel_counts_and_shows_a_rollout_and_cuts_no_number(width: int) -> None:
    text = panel_text(width)
    assert all(len(line) <= width for line in text.splitlines())
    words = " ".join(text.replace("│", " ").split())
    for shown in ("evaluate 120/400", "look here", "It is�[2J a very long answer", "reward 1, 2 turns, terminated",
                  "cut at tokens 12%",
                  "grad 0.61", "EM 0.400 [0.300, 0.500]", "400 tasks", "2 FAILED", "= 2.0 s"):  # fmt: skip
        assert shown in words, text
    assert "\x1b" not in text, "a policy must not steer the terminal"


def test_a_resumed_panel_keeps_its_curve_and_its_first_evaluation() -> None:
    progress = Progress("rich", steps=20, first_step=3, stream=io.StringIO())
    progress.registered = REGISTERED
    earlier = [{"step": 0, **EVALUATION}, *({"step": step, **STEP, "train/reward": step / 10} for step in (1, 2, 3))]
    progress.restore(earlier)
    progress.step(4, {**STEP, "train/reward": 0.4})
    lines = dict(progress.rows())
    progress.close()
    assert lines["reward"] == "0.400  ▁▃▆█" and lines["eval at 0"].startswith("EM 0.400")


def test_the_panels_time_is_that_of_all_sessions() -> None:
    progress = Progress("rich", steps=20, stream=io.StringIO(), clock=Clock(before_s=600.0))
    assert "10:00" in dict(progress.rows())["step"]
    progress.close()


def test_an_end_that_was_none_is_not_called_done() -> None:
    stream = io.StringIO()
    progress = Progress("rich", steps=20, stream=stream)
    progress.phase("update")
    progress.close()
    progress.close()
    assert "stopped in: update" in stream.getvalue() and "done" not in stream.getvalue()


KEYS = """
import sys, termios
from rlflow.report.terminal import hidden_control_keys
def printed():
    return bool(termios.tcgetattr(sys.stdin)[3] & termios.ECHOCTL)
before = printed()
undo = hidden_control_keys(sys.stdin)
during = printed()
undo()
print(before, during, printed())
"""


def test_the_terminal_prints_no_control_c_while_the_panel_is_there() -> None:
    hidden_control_keys(io.StringIO())()  # no terminal: of no effect
    child, terminal = pty.fork()  # a terminal of its own, in whose foreground it is
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", KEYS])
    said = b""
    with contextlib.suppress(OSError):  # EIO: the child has ended
        while part := os.read(terminal, 1024):
            said += part
    os.waitpid(child, 0)
    assert said.split() == [b"True", b"False", b"True"], said
