"""Actions of a policy, tasks of pages, and the scripted player; all without a browser."""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.errors import ConfigError, MissingPackageError
from rlflow_environments.browser import miniwob
from rlflow_environments.browser.actions import LONGEST_TEXT, parse_action
from rlflow_environments.browser.player import play

PAGES = ("click-test-2", "enter-text", "use-slider")


def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> miniwob.MiniWob:
    """One whose package has three pages, empty ones."""
    folder = tmp_path / "html" / "miniwob"
    folder.mkdir(parents=True, exist_ok=True)
    for name in PAGES:
        (folder / f"{name}.html").touch()
    spec = ModuleSpec("miniwob", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(miniwob, "find_spec", lambda name: spec)
    return miniwob.MiniWob(**{"program": shutil.which("true"), "pages": "all", **options})


def arguments(script: str | None) -> list[Any] | None:
    """What a script calls `rlflow.act` with."""
    return (
        None
        if script is None
        else json.loads(f"[{script.removeprefix('rlflow.act(').removesuffix(')')}]")
    )


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("click 3\n", ["click", 3, ""]),
        ("type 12 a  b \n", ["type", 12, "a  b"]),
        ("type 1\n", ["type", 1, ""]),
        ('type 1 \\"); alert(1)\n', ["type", 1, '\\"); alert(1)']),
        ("scroll down", ["scroll", 0, "down"]),
        ("\n click 2\nclick 3", ["click", 2, ""]),
        ("click", None),
        ("click 1 2", None),
        ("click -1", None),
        ("click 99999", None),
        ("scroll left", None),
        ("Click 1", None),
        ("", None),
    ],
)
def test_an_action_is_read_or_refused(response: str, expected: list[Any] | None) -> None:
    assert arguments(parse_action(response)) == expected


@given(st.text())
def test_what_is_typed_is_only_ever_a_text_of_the_script(text: str) -> None:
    script = parse_action(f"type 1 {text}")
    if script is not None:
        kind, number, typed = arguments(script) or []
        assert (kind, number) == ("type", 1) and "\n" not in script
        assert len(typed) <= LONGEST_TEXT and typed in text


def test_tasks_are_pages_and_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = environment(tmp_path, monkeypatch, tasks_per_split=6)
    train, val = made.tasks("train"), made.tasks("val")
    assert [task.metadata["page"] for task in train] == [*PAGES, *PAGES]
    assert len({task.answer for task in (*train, *val)}) == 12 and made.tasks("test") == []
    assert environment(tmp_path, monkeypatch, tasks_per_split=6).tasks("train") == train
    assert (
        environment(tmp_path, monkeypatch, tasks_per_split=6, seed=1).tasks("train")[0].answer
        != train[0].answer
    )


def test_what_is_missing_or_wrong_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError, match=r"no page 'enter-txt' among the 3 of miniwob\. Did you mean 'enter-text'"
    ):
        environment(tmp_path, monkeypatch, pages=["enter-txt"])
    with pytest.raises(ConfigError, match="found none"):
        environment(tmp_path, monkeypatch, pages=[])
    with pytest.raises(MissingPackageError, match="apt install chromium"):
        environment(tmp_path, monkeypatch, program="no-such-chromium")
    monkeypatch.setattr(miniwob, "find_spec", lambda name: None)
    with pytest.raises(
        MissingPackageError, match=r"the package 'miniwob' is not installed: pip install"
    ):
        miniwob.MiniWob()
    assert importlib.util.find_spec("rlflow_environments.browser") is not None


PROMPT = "Actions.\nTask: {goal}\n{lines}Action:\n"


@pytest.mark.parametrize(
    ("goal", "pages", "expected"),
    [
        ("Click button ONE.", ['1 button "TWO"\n2 button "ONE"\n'], ["click 2"]),
        (
            "Click button ONE, then click button TWO.",
            ['1 button "TWO"\n2 button "ONE"\n'] * 2,
            ["click 2", "click 1"],
        ),
        (
            'Enter "Ada" into the text field and press Submit.',
            ['1 input ""\n2 button "Submit"\n', '1 input "Ada"\n2 button "Submit"\n'],
            ["type 1 Ada", "click 2"],
        ),
        (
            'Click on the "no" button.',
            ['1 div "no no"\n2 button "yes"\n3 button "no"\n'],
            ["click 3"],
        ),
    ],
)
def test_the_player_does_what_the_page_asks(
    goal: str, pages: list[str], expected: list[str]
) -> None:
    prompt, turns = PROMPT.format(goal=goal, lines=pages[0]), []
    for page, wanted in zip([*pages[1:], ""], expected, strict=True):
        response = play(prompt, turns, random.Random(0), False)
        assert response == f"{wanted}\n"
        turns.append((response, f"{page}Action:\n"))


def test_the_clumsy_player_is_drawn_to_the_first_element() -> None:
    prompt = PROMPT.format(goal="Click button ONE.", lines='1 button "TWO"\n2 button "ONE"\n')
    said = [play(prompt, [], random.Random(seed), True) for seed in range(400)]
    assert set(said) == {"click 1\n", "click 2\n"} and 0.3 < said.count("click 2\n") / 400 < 0.5
    assert all(parse_action(one) for one in said)
