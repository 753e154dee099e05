"""Texts and names of others: what a terminal and a file may hold."""

from __future__ import annotations

import logging
from io import StringIO
from pathlib import Path

import pytest

from rlflow import Environment
from rlflow.environment import step_problem
from rlflow.errors import EnvironmentContractError, described
from rlflow.report.terminal import Progress, RunLog
from rlflow.rollout.environment_calls import reported, tasks_of
from rlflow.texts import LONGEST_LINE, MOST_NAMES, one_line, printable, printable_styled, wrong_name
from rlflow.types import Episode, Step, Task

CLEARS = "\x1b[2J\x1b]0;title\x07"
"""Clears a terminal and names its window."""
CONTROL = [*map(chr, range(32)), *map(chr, range(127, 160)), "\u202e", "\u2028", "\ud83d"]


def test_no_control_character_is_printable_but_line_breaks_and_tabs() -> None:
    for letter in CONTROL:
        shown = printable(f"a{letter}b")
        assert shown == (f"a{letter}b" if letter in "\n\t" else "a\ufffdb")
        assert one_line(f"a{letter}b").isprintable()
    text = "naïve Größe 数学 \U0001f600\n\t~"
    assert printable(text) == text


def test_our_colours_stay_and_no_other_sequence() -> None:
    painted = f"\x1b[32;1mgood {CLEARS}\x1b[0m \x1b[8mhidden"
    shown = printable_styled(painted)
    assert shown.startswith("\x1b[32;1mgood \ufffd[2J") and shown.count("\x1b") == 2
    assert printable_styled("plain") == "plain"


def test_a_line_has_a_bounded_length_and_keeps_both_ends() -> None:
    line = one_line("x" * 10**6 + " the end")
    assert len(line) < LONGEST_LINE + 20 and line.endswith(" the end")
    assert len(described(ValueError("\n" * 10 + "y" * 10**6))) < LONGEST_LINE + 40
    assert described(ValueError(CLEARS)).isprintable()


@pytest.mark.parametrize(
    "name", ["", "a\nb", CLEARS, "x" * 101, "\u202egpj", "a\x00", " a", 3, '<b>"</b>']
)
def test_a_name_that_is_no_short_word_is_refused(name: object) -> None:
    problem = wrong_name([name])
    assert problem and problem.isprintable() and len(problem) < 250


def test_usual_names_pass_and_their_number_is_bounded() -> None:
    usual = ["reward", "pass@1", "tools/calls per turn", "f1 (strict)", "Größe", "top-k.2", "a>=3"]
    assert wrong_name(usual) == ""
    names = [f"m{number}" for number in range(3_000)]
    assert wrong_name(names[:MOST_NAMES]) == ""
    assert f"more than {MOST_NAMES}" in wrong_name(names)


class Reporting(Environment):
    """Names its numbers and tasks as it is told."""

    def __init__(self, name: str) -> None:
        self._name = name

    def tasks(self, split: str) -> list[Task]:
        return [Task(self._name, "x")]

    async def reset(self, task: Task) -> Episode:
        return Episode(task)

    async def step(self, episode: Episode, response: str) -> Step:
        return Step("", metrics={self._name: 1.0})

    def report(self) -> dict[str, float]:
        return {self._name: 1.0}


def test_environments_name_numbers_in_short_words_and_tasks_by_short_ids() -> None:
    assert step_problem(Step("", metrics={"calls": 1.0}, rewards={"style": 0.5})) is None
    for numbers in ({CLEARS: 1.0}, {f"m{number}": 1.0 for number in range(3_000)}):
        assert step_problem(Step("", metrics=numbers)) is not None
        assert step_problem(Step("", rewards=numbers)) is not None
    with pytest.raises(EnvironmentContractError, match="the name"):
        reported(Reporting(CLEARS))
    with pytest.raises(EnvironmentContractError, match="an id of 100,000 characters"):
        tasks_of(Reporting("x" * 100_000), "train")


def test_neither_a_run_s_terminal_nor_its_log_gets_a_control_character(tmp_path: Path) -> None:
    """Whatever a task's id or an agent's error holds."""
    stream = StringIO()
    Progress("plain", stream=stream).message(f"task {CLEARS} failed")
    with RunLog() as log:
        log.write_to(tmp_path / "run.log")
        logging.getLogger("rlflow.test").warning("task %s failed", CLEARS)
    for text in (stream.getvalue(), (tmp_path / "run.log").read_text()):
        assert "failed" in text and "\x1b" not in text and "\x07" not in text
