"""Actions of NetHack by name, as a policy writes them, and the keys that they press."""

from __future__ import annotations

from collections.abc import Collection

from rlflow.errors import ConfigError, did_you_mean

MOST_WORDS = 4  # of a line
_DIRECTIONS = {
    "north": "k",
    "east": "l",
    "south": "j",
    "west": "h",
    "northeast": "u",
    "southeast": "n",
    "southwest": "b",
    "northwest": "y",
}


def _meta(key: str) -> str:
    return chr(0x80 | ord(key))


def _control(key: str) -> str:
    return chr(0x1F & ord(key))


NAMES: dict[str, str] = {
    **_DIRECTIONS,
    **{f"far-{name}": key.upper() for name, key in _DIRECTIONS.items()},
    "up": "<",
    "down": ">",
    "travel": "_>.",  # to the stairs down, where they were seen
    "travel-up": "_<.",
    "wait": ".",
    "search": "s",
    "pickup": ",",
    "look": ":",
    "inventory": "i",
    "apply": "a",
    "attributes": _control("x"),
    "cast": "Z",
    "chat": _meta("c"),
    "close": "c",
    "dip": _meta("d"),
    "drop": "d",
    "eat": "e",
    "engrave": "E",
    "enhance": _meta("e"),
    "fight": "F",
    "fire": "f",
    "force": _meta("f"),
    "invoke": _meta("i"),
    "jump": _meta("j"),
    "kick": _control("d"),
    "loot": _meta("l"),
    "monster": _meta("m"),
    "offer": _meta("o"),
    "open": "o",
    "overview": _control("o"),
    "pay": "p",
    "pray": _meta("p"),
    "puton": "P",
    "quaff": "q",
    "quiver": "Q",
    "read": "r",
    "remove": "R",
    "ride": _meta("R"),
    "rub": _meta("r"),
    "sit": _meta("s"),
    "swap": "x",
    "takeoff": "T",
    "throw": "t",
    "tip": _meta("T"),
    "turn": _meta("t"),
    "twoweapon": "X",
    "untrap": _meta("u"),
    "wear": "W",
    "wield": "w",
    "wipe": _meta("w"),
    "zap": "z",
}
"""Name of a command -> its keys. Those that save, quit or change options are left out."""
ANSWERS = {"yes": "y", "no": "n", "confirm": "\r", "esc": "\x1b"}
Pressed = tuple[str, bool]
"""(keys, whether they answer a question and are pressed only where the game asks one)."""


def parse_action(response: str, names: Collection[str] = NAMES) -> list[Pressed] | None:
    """The keys of a response's first line, a word after the other: names of commands, answers, and
    single characters, which answer too. None where it holds none, or anything else."""
    words = response.strip().split("\n")[0].split()
    if not 0 < len(words) <= MOST_WORDS:
        return None
    found = []
    for word in words:
        if word in names:
            found.append((NAMES[word], False))
        elif word in ANSWERS or (len(word) == 1 and " " < word <= "~"):
            found.append((ANSWERS.get(word, word), True))
        else:
            return None
    return found


def check_names(names: Collection[str]) -> tuple[str, ...]:
    """The names. Raises ConfigError for one that is none."""
    for name in names:
        if name not in NAMES:
            raise ConfigError(
                f"environment.actions: no action '{name}'; expected some of {', '.join(NAMES)}."
                f"{did_you_mean(str(name), NAMES)}"
            )
    if not names:
        raise ConfigError("environment.actions: expected names of actions, found none.")
    return tuple(names)
