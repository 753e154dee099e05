"""`rlflow env new | check | play`: what is written, what is told of a mistake, and how a person plays."""

from __future__ import annotations

import ast
import io
import runpy
import sys
from pathlib import Path

import pytest
from rlflow_tools.kit.checks.environments import check_environment
from rlflow_tools.kit.play import find_task, play, read_response
from rlflow_tools.kit.scaffold import LEARNING, write_environment

from rlflow.commands import cli
from rlflow.components import ENVIRONMENT
from rlflow.environment import Environment
from rlflow.errors import ConfigError
from rlflow.types import Episode, Step, Task


def test_a_scaffolded_environment_is_short_keeps_the_contract_and_passes_its_own_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = write_environment("word_game", tmp_path)
    source, test, reference = made.source, made.test, made.reference
    assert len(source.read_text().splitlines()) <= 30
    assert [
        node.name for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)
    ] == ["WordGame"]
    report = check_environment(ENVIRONMENT.build({"name": reference}), episodes=8)
    assert report.passed, str(report)
    monkeypatch.setattr(sys, "path", [*sys.path])  # its test puts its folder there
    tests = {
        name: each for name, each in runpy.run_path(str(test)).items() if name.startswith("test_")
    }
    del sys.modules["word_game"]
    assert len(tests) == 2
    for each in tests.values():
        each()


@pytest.mark.parametrize(
    "name", ["Word-Game", "class", "9lives", "a b", "random", "Random", "rlflow"]
)
def test_a_name_that_is_no_module_name_or_anothers_is_refused(name: str, tmp_path: Path) -> None:
    told = r"expected a snake_case name that no module has, such as '(?!random|rlflow)"
    with pytest.raises(ConfigError, match=told):
        write_environment(name, tmp_path)


def test_a_scaffold_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "test_guess.py").write_text("mine")
    with pytest.raises(ConfigError, match="is there already"):
        write_environment("guess", tmp_path)
    assert not (tmp_path / "guess.py").exists()


def test_env_check_prints_problems_and_exits_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = write_environment("guess", tmp_path)
    source, reference = made.source, made.reference
    assert cli.main(["env", "check", reference, "environment.highest=5", "--episodes", "4"]) == 0
    assert "train: 64 tasks" in capsys.readouterr().out
    bad = tmp_path / "bad.py"
    bad.write_text(
        source.read_text()
        .replace("return Step(reward=1.0", "return (1.0")
        .replace(', terminated=True, metrics={"exact_match": 1.0})', ")")
    )
    assert cli.main(["env", "check", f"{bad}:Guess", "--episodes", "8"]) == 1
    assert "PROBLEM: step: expected an rlflow.Step, found float" in capsys.readouterr().out


def test_env_check_of_what_is_no_environment_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text("class Mine: pass\ndef made(): return 3\n")
    for name, told in (
        ("Mine", "expected an rlflow.Environment, found a class"),
        ("made", "it returned int"),
    ):
        assert cli.main(["env", "check", f"{tmp_path / 'mine.py'}:{name}"]) == 2
        assert told in capsys.readouterr().err


def test_an_agent_in_the_place_of_an_environment_is_told_how_it_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my.py").write_text("def agent(task, client):\n    return 1.0\n")
    assert cli.main(["env", "check", f"{tmp_path}/my.py:agent"]) == 2
    assert f"environment.name=program environment.agent={tmp_path}/my.py:agent" in (
        capsys.readouterr().err
    )


def test_a_person_plays_to_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference = write_environment("guess", tmp_path).reference
    environment = ENVIRONMENT.build({"name": reference})
    task = next(task for task in environment.tasks("train") if task.answer == 7)
    play(environment, task=task.id, source=io.StringIO("5\n8\nI say\n7\n"), color="never")
    out = capsys.readouterr().out
    told = [
        out.index(words)
        for words in ("higher", "lower", "A number, please.", "terminated after 4 turns, return 1")
    ]
    assert told == sorted(told)


def test_no_number_stands_twice_under_a_response(capsys: pytest.CaptureFixture[str]) -> None:
    """Environments of tools report their reward as a metric too."""

    class Pays(Environment):
        def tasks(self, split: str) -> list[Task]:
            return [Task("a", "p")]

        def step(self, episode: Episode, response: str) -> Step:
            metrics = {"tool_calls": 1.0, "reward": 1.0}
            return Step("done", reward=1.0, terminated=True, metrics=metrics)

    play(Pays(), source=io.StringIO("x\n\n"), color="never")
    assert "reward 1  tool_calls 1\n" in capsys.readouterr().out


def test_the_scaffolds_validation_asks_what_its_training_never_did(tmp_path: Path) -> None:
    environment = ENVIRONMENT.build({"name": write_environment("guess", tmp_path).reference})
    prompts = {
        split: {task.prompt for task in environment.tasks(split)} for split in ("train", "val")
    }
    assert prompts["val"] and not prompts["train"] & prompts["val"]
    assert all(len(environment.tasks(split)) == 64 for split in prompts)


def test_a_scripted_player_plays_and_one_watches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = write_environment("guess", tmp_path, LEARNING)
    assert cli.main(["env", "play", made.reference, "--player", made.player, "--split", "val"]) == 0
    out = capsys.readouterr().out
    assert "The player is the policy." in out and "terminated after" in out and "return 1" in out
    assert out.count("> ") >= 1
    call = ["env", "play", made.reference, "--player"]
    (tmp_path / "bad.py").write_text("def raises(*_): return {}['x']\ndef number(*_): return 5\n")
    for player, told in (("raises", "KeyError: 'x' (" + str(tmp_path)), ("number", "found 5.")):
        assert cli.main([*call, f"{tmp_path}/bad.py:{player}"]) == 2
        assert told in capsys.readouterr().err
    assert cli.main([*call, made.player, "--turns", "0"]) == 2
    assert "--turns: expected at least 1, found 0." in capsys.readouterr().err


def test_a_line_break_that_ends_responses_reaches_the_environment_and_breaks_no_header(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Echo(Environment):
        stop = ("\n", "</end>")
        said: list[str] = []

        def tasks(self, split: str) -> list[Task]:
            return [Task("a", "Say.\n")]

        def step(self, episode: Episode, response: str) -> Step:
            self.said.append(response)
            return Step("\n", terminated=len(self.said) == 3)

    play(Echo(), source=io.StringIO("five\n\nsix</end> more\n"), color="never")
    assert Echo.said == ["five\n", "\n", "six</end>"]
    header = capsys.readouterr().out.splitlines()[0]
    assert header == "task a. You are the policy: a response ends with Enter; Ctrl-D leaves."


def test_stop_strings_stand_in_the_header_so_that_they_can_be_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Odd(Environment):
        stop = ("</a>", " \t", "\n\n")

        def tasks(self, split: str) -> list[Task]:
            return [Task("a", "Say.")]

        def step(self, episode: Episode, response: str) -> Step:
            return Step(response, terminated=True)

    play(Odd(), source=io.StringIO("one\ntwo\n\nthree"), color="never")
    header, *rest = capsys.readouterr().out.splitlines()
    assert r"ends with an empty line or </a> or ' \t' or '\n\n'; Ctrl-D" in header and rest[
        1:3
    ] == ["> one", "two"]


def test_leaving_and_the_turn_limit_end_a_game(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = write_environment("guess", tmp_path).reference
    environment = ENVIRONMENT.build({"name": reference})
    play(environment, source=io.StringIO(""), color="never")
    assert "left after 0 turns" in capsys.readouterr().out
    play(environment, max_turns=2, source=io.StringIO("0\n" * 9), color="never")
    assert "turn limit (2) reached" in capsys.readouterr().out


def test_a_response_ends_with_an_empty_line_or_a_stop_string() -> None:
    lines = io.StringIO("think\n<answer>x</answer> more\nnext\n\nlast")
    assert read_response(lines, ("</answer>",)) == "think\n<answer>x</answer>"
    assert read_response(lines, ("</answer>",)) == "next"
    assert read_response(lines, ()) == "last"
    assert read_response(lines, ()) is None


def test_tasks_are_found_by_id_before_position() -> None:
    tasks = [Task("1", "a"), Task("0", "b")]
    assert find_task(tasks, "0", "train").prompt == "b"
    with pytest.raises(ConfigError, match="a position below 2, found '5'"):
        find_task(tasks, "5", "train")
    with pytest.raises(ConfigError, match=r"tasks\('val'\) is empty"):
        find_task([], "0", "val")
