"""Actions of NetHack as they are written, the text that is read, and the scripted player; all without a game."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import pytest

from rlflow.errors import ConfigError, MissingPackageError
from rlflow_environments.nethack import dungeons
from rlflow_environments.nethack.actions import NAMES, parse_action
from rlflow_environments.nethack.environment import NetHack
from rlflow_environments.nethack.player import play
from rlflow_environments.nethack.screen import text_of
from rlflow_environments.nethack.worker import _page


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("north\n", [("k", False)]),
        ("far-east", [("L", False)]),
        (" kick  west \n", [("\x04", False), ("h", False)]),
        ("eat d", [("e", False), ("d", True)]),
        ("travel\nnorth", [("_>.", False)]),
        ("pray yes", [("\xf0", False), ("y", True)]),
        (">", [(">", True)]),
        ("North", None),
        ("save", None),
        ("#quit", None),
        ("\x01", None),
        ("é", None),
        ("a b c d e", None),
        ("", None),
        (" \n", None),
    ],
)
def test_an_action_is_read_or_refused(response: str, expected: list[Any] | None) -> None:
    assert parse_action(response) == expected
    assert parse_action(response, ["south"]) in (None, [(">", True)])


def test_no_word_presses_a_key_that_saves_or_quits_unless_the_game_asks() -> None:
    known = {*NAMES, "yes", "no", "confirm", "esc"}
    for word in ("save", "quit", "#", "Q!", "\u2028", *map(chr, range(0x300))):
        for keys, answers in parse_action(word) or []:
            assert answers and keys == word and word.isprintable()
    assert not {"S", "\xf1", "O", "!", "#"} & {NAMES[name] for name in known & set(NAMES)}


def view(**changes: Any) -> dict[str, Any]:
    rows = [" " * 9, "  ---    ", "  |.@|  >", "  ---    "]
    seen = {"said": ["A.", "B."], "rows": rows, "at": [4, 2], "place": [0, 1], "status": "Dlvl:1"}
    return {**seen, **changes}


def test_a_page_over_the_whole_screen_keeps_its_first_letters() -> None:
    page = ["Agent the Valkyrie:", " You are neutral.", " (1 of 2)"]
    assert _page(page) == ("\n".join(page), True)
    assert _page(["map  Weapons", "map  (end)"]) == ("Weapons\n(end)", True)


def test_a_window_surrounds_the_player_and_tells_the_way_to_stairs() -> None:
    known: dict[str, Any] = {}
    assert text_of(view(), 1, known) == "A. B.\n--\n.@|\n--\n> 4 east\nDlvl:1\n"
    rows = ["<        ", "  ---    ", "  |@.|   ", "  ---    "]
    text = text_of(view(rows=rows, at=[3, 2], said=[]), 2, known)  # what was seen before is known
    assert text == "(no message)\n\n ---\n |@.|\n ---\n\n> 5 east, < 3 west 2 north\nDlvl:1\n"
    assert "> here" in text_of(view(at=[8, 2]), 1, known)
    assert text_of(view(), None, {}) == "A. B.\n  ---\n  |.@|  >\n  ---\nDlvl:1\n"
    listed = text_of(view(said=["A.", "Tools\ne - a pick-axe\n(end)"]), None, {})
    assert listed.startswith("A.\nTools\ne - a pick-axe\n(end)\n  ---\n")
    corner = text_of(view(at=[0, 0], said=["X."]), 1, {})
    assert corner.startswith("X.\n\n\n\n")


def test_what_is_missing_or_wrong_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"no action 'nort'; expected some of .*Did you mean 'north'"
    ):
        NetHack(actions=["nort"])
    with pytest.raises(ConfigError, match="found none"):
        NetHack(actions=[])
    for wrong in ("monk", "mon-hum-neu-mal,playmode:debug", "xxx-hum-neu-mal"):
        with pytest.raises(ConfigError, match=r"environment\.character"):
            NetHack(wrong)
    monkeypatch.setattr(dungeons, "find_spec", lambda name: None)
    with pytest.raises(
        MissingPackageError, match=r"the package 'nle' is not installed: pip install .*nethack"
    ):
        NetHack()
    assert importlib.util.find_spec("rlflow_environments.nethack") is not None


PROMPT = "NetHack: x. Actions, a line each: {names}.\nHello Agent, an {role}.\n---\n.@|\n---\nDlvl:1 T:1\nAction:\n"


def test_the_player_digs_where_it_can_and_looks_for_stairs_elsewhere() -> None:
    draw = random.Random(0)
    prompt, turns = PROMPT.format(names="west, apply, down, travel", role="Archeologist"), []
    for said, expected in (
        ("", "west"),
        ("The stairs are too hard to dig in.", "west"),
        ("(no message)", "apply"),
        ("What do you want to use or apply? [ae-i or ?*]", "e"),
        ("You wield it. In what direction do you want to dig? [yb>]", ">"),
        ("Really attack? [yn] (n)", "esc"),
    ):
        turns += [("x", f"{said}\n---\n.@|\n---\nDlvl:1 T:1\nAction:\n")] if said else []
        assert play(prompt, turns, draw, False) == f"{expected}\n"
    monk = PROMPT.format(names="far-west, far-east, down, travel", role="Monk")
    for line, expected in (("", "far-west"), ("> 3 east\n", "travel"), ("> here\n", "down")):
        turns = [("x", f"(no message)\n---\n.@|\n---\n{line}Dlvl:1 T:1\nAction:\n")]
        assert play(monk, turns, draw, False) == f"{expected}\n"
    clumsy = {play(monk, [], draw, True) for _ in range(200)}
    assert clumsy == {"far-west\n", "far-east\n", "down\n", "travel\n"}
