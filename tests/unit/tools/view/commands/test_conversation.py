"""A conversation in the terminal."""

from __future__ import annotations

import io
import sys

import pytest
from rlflow_tools.view.commands.ask import _sort_words, typed
from rlflow_tools.view.commands.conversation import Columns, Conversation, collapsed, side_by_side

from rlflow.commands import cli
from rlflow.commands.paint import Paint
from rlflow.errors import ConfigError

PLAIN = Paint("never")
LONG = (
    "\n\n<information>"
    + "\n".join(f"Doc {number} {'word ' * 40}" for number in range(1, 8))
    + "</information>\n"
)


def tell(conversation: Conversation, *turns: tuple[str, str]) -> None:
    for shown, said in turns:
        conversation.shown(shown)
        for stop in range(3, len(said), 3):
            conversation.said(said[:stop], False)
        conversation.said(said, True)


def test_a_response_is_printed_once_as_it_comes_and_what_is_shown_is_collapsed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    conversation = Conversation(PLAIN, live=True)
    tell(
        conversation,
        ("the prompt", "<think> hm </think><find> x </find>"),
        (LONG, "<answer> y </answer>"),
    )
    conversation.finish("terminated", "")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "<think> hm </think><find> x </find>" and lines[-1] == "<answer> y </answer>"
    assert (
        len(lines) == 7
        and lines[5] == "  │ … 3 more lines; --full shows them"
        and max(map(len, lines)) <= 80
    )


def test_thoughts_are_dim_and_a_tag_is_styled_even_where_pieces_cut_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tell(
        Conversation(Paint("always"), live=True), ("prompt", "a<think>b</think>c<answer>d</answer>")
    )
    out = capsys.readouterr().out
    plain = out.replace("\033[0m", "")
    for style in ("2", "36", "36;1"):
        plain = plain.replace(f"\033[{style}m", "")
    assert plain == "a<think>b</think>c<answer>d</answer>\n"
    for part, style in {"<think>": "2", "b": "2", "d": "36;1", "c": "36", "</answer>": "2"}.items():
        assert f"\033[{style}m{part}\033[0m" in out


def test_nobody_steers_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(PLAIN, live=True)
    tell(conversation, ("prompt", "a\x1b[2Jb"), ("x\x1b]0;t\x07\ry", "\x9b31m"))
    conversation.finish("aborted", "\x1b[1m")
    assert not set(capsys.readouterr().out) & set("\x1b\x07\x9b\r")


def test_two_conversations_stand_beside_each_other_in_80_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    heard = [
        ("after", Conversation(PLAIN, live=False)),
        ("before", Conversation(PLAIN, live=False)),
    ]
    tell(heard[0][1], ("p", "look it up " * 8), (LONG, "<answer> y </answer>"))
    tell(heard[1][1], ("p", "<answer> I guess </answer>"))
    heard[1][1].finish("max_turns", "")
    lines = side_by_side(heard, PLAIN).splitlines()
    assert all(len(line) <= 80 and line[38:41] == " │ " for line in lines)
    assert lines[0].split("│")[1].strip() == "before" and "I guess" in lines[1]
    assert "cut: max_turns" in lines[-1] and any("… 3 more lines" in line for line in lines)


def test_columns_are_drawn_while_they_are_written_and_stand_whole_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")  # nothing is redrawn on a terminal that cannot
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with Columns(["before", "after"], PLAIN) as columns:
        (_, before), (_, after) = columns.heard
        before.shown("prompt")
        before.said("I gu", False)
        assert "I gu" in (first := capsys.readouterr().out) and "I guess" not in first
        before.said("I guess", True)
        assert "I guess" in capsys.readouterr().out
        tell(after, ("prompt", "look it up"), (LONG, "Vasmere"))
        assert "Vasmere" in capsys.readouterr().out
        after.finish("terminated", "")
        capsys.readouterr()
    rows = [
        [part.strip() for part in line.split(" │ ")]
        for line in capsys.readouterr().out.splitlines()
    ]
    assert ["I guess", "look it up"] in rows and ["", "Vasmere"] in rows
    assert before.turns == [("I guess", "")] and [said for said, _ in after.turns] == [
        "look it up",
        "Vasmere",
    ]


def test_whole_observations_are_wrapped() -> None:
    assert max(map(len, collapsed(LONG, 60, whole=True))) <= 60
    assert " ".join(" ".join(collapsed(LONG, 60, whole=True)).split()) == " ".join(LONG.split())


def test_a_question_and_keys_are_told_apart_wherever_they_stand() -> None:
    for words in (["M", "Who?", "rollout.max_turns=2"], ["M", "--before", "Who?", "rollout.max_turns=2"],
                  ["M", "--full", "Who?", "rollout.max_turns=2"],
                  ["--full", "M", "Who?", "--color", "never", "rollout.max_turns=2"]):  # fmt: skip
        args = cli.parse(["ask", *words])
        _sort_words(args)
        assert (args.question, args.overrides) == ("Who?", ["rollout.max_turns=2"]), words
    args = cli.parse(["ask", "M", "environment.top_k=5"])
    _sort_words(args)
    assert (args.question, args.overrides) == (None, ["environment.top_k=5"])
    args = cli.parse(["ask", "M", " "])
    with pytest.raises(ConfigError, match="empty"):
        _sort_words(args)


def test_questions_are_read_to_the_end_of_the_input() -> None:
    assert list(typed(io.StringIO("one\n\n  two \n"))) == ["one", "two"]
