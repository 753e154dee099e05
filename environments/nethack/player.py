"""A scripted player of NetHack: digs down where it has a pick-axe, else looks for the stairs."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

RIGHT = 0.5  # chance of a clumsy player's right action
DIGGERS = ("Archeologist", "Dwarf", "dwarven")
PICK_AXE = re.compile(r"^(\w) - .*(?:pick-axe|mattock)", re.MULTILINE)
USUAL_LETTER = "e"  # of an archeologist's pick-axe
FREE = frozenset(".#$%?!<>")
ASKED = re.compile(r"\[[^\]\n]+\] ?(?:\(\w\) ?)?$", re.MULTILINE)
WAYS = {
    "north": (0, -1),
    "east": (1, 0),
    "south": (0, 1),
    "west": (-1, 0),
    "northeast": (1, -1),
    "southeast": (1, 1),
    "southwest": (-1, 1),
    "northwest": (-1, -1),
}
WRONG_ANSWERS = ("a", "b", "d", "e", "f", "g", "h", ">", "<", ".", "esc")


def play(
    prompt: str, turns: Sequence[tuple[str, str]], generator: random.Random, clumsy: bool
) -> str:
    """The next action; a clumsy one is most often any."""
    named = re.search(r"Actions, a line each: (.*)\.\n", prompt)
    names = named[1].split(", ") if named else list(WAYS)
    seen = turns[-1][1] if turns else prompt[named.end() if named else 0 :]
    asked = ASKED.search(seen.split("\n")[0])
    if clumsy and generator.random() > RIGHT:
        return f"{generator.choice(WRONG_ANSWERS if asked else names)}\n"
    if asked:
        return f"{_answer(asked.string, prompt, turns)}\n"
    for text, action in (("> here", "down"), ("\n> ", "travel")):
        if text in seen and action in names:
            return f"{action}\n"
    digs = any(word in prompt for word in DIGGERS) and "apply" in names
    if digs and turns and "stairs" not in seen.split("\n")[0]:  # it begins on stairs
        return "apply\n"
    return f"{_move(seen, names, generator)}\n"


def _answer(asked: str, prompt: str, turns: Sequence[tuple[str, str]]) -> str:
    if "want to dig" in asked:
        return ">" if ">" in asked.split("[")[-1] else "esc"
    if "use or apply" in asked:
        found = [letter for _, text in turns for letter in PICK_AXE.findall(text)]
        return found[-1] if found else USUAL_LETTER
    return "esc"


def _move(seen: str, names: Sequence[str], generator: random.Random) -> str:
    """Into a free cell beside the player, far if there is such an action."""
    lines = seen.split("\n")
    row = next((number for number, line in enumerate(lines) if number and "@" in line), 0)
    column = lines[row].find("@")

    def free(name: str) -> bool:
        east, south = WAYS[name]
        line = lines[row + south] if 0 < row + south < len(lines) else ""
        return 0 <= column + east < len(line) and line[column + east] in FREE

    ways = [name for name in WAYS if name in names or f"far-{name}" in names]
    way = generator.choice([name for name in ways if free(name)] or ways)
    return f"far-{way}" if f"far-{way}" in names else way
