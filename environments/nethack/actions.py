"""Actions of NetHack by name, as a policy writes them, and the keys that they press."""

from __future__ import annotations

from collections.abc import Collection

from rlflow.errors import ConfigError, did_you_mean

MOST_WORDS = 4  # of a line
_DIRECTIONS = "north k east l south j west h northeast u southeast n southwest b northwest y"
_COMMANDS = (
    "up < down > wait . search s pickup , look : inventory i apply a attributes C-x cast Z chat "
    "M-c close c dip M-d drop d eat e engrave E enhance M-e fight F fire f force M-f invoke M-i "
    "jump M-j kick C-d loot M-l monster M-m offer M-o open o overview C-o pay p pray M-p puton P "
    "quaff q quiver Q read r remove R ride M-R rub M-r sit M-s swap x takeoff T throw t tip M-T "
    "turn M-t twoweapon X untrap M-u wear W wield w wipe M-w zap z"
)
_MODIFIED = {"C-": lambda key: chr(0x1F & ord(key)), "M-": lambda key: chr(0x80 | ord(key))}


def _keys(listed: str) -> dict[str, str]:
    """Name -> key of names and keys in turn; C- and M- stand for Control and Meta."""
    words = listed.split()
    return {
        name: _MODIFIED.get(key[:2], str)(key[-1])
        for name, key in zip(words[::2], words[1::2], strict=True)
    }


NAMES: dict[str, str] = {
    **_keys(_DIRECTIONS),
    **{f"far-{name}": key.upper() for name, key in _keys(_DIRECTIONS).items()},
    "travel": "_>.",  # to the stairs down, where they were seen
    "travel-up": "_<.",
    **_keys(_COMMANDS),
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
