"""Regular expressions in linear time: Python's syntax without what needs backtracking.

`re` backtracks: on a text of the policy's choice, a pattern such as (a+)+$ takes time exponential in the length. A pattern is
read here by the parser of `re`, and run as a set of states that the text moves forward once (Thompson, "Regular Expression
Search Algorithm", 1968), with the transitions seen so far kept. It says whether a pattern occurs, not where.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from rlflow.errors import ConfigError

MOST_STATES = 1000
KEPT_TRANSITIONS = 20_000
CHARACTERS = ("LITERAL", "NOT_LITERAL", "ANY", "IN")

_parser: Any = importlib.import_module("re._parser")
_compiler: Any = importlib.import_module("re._compiler")


class Pattern:
    """A regular expression that costs time in proportion to the text. Groups with references, lookaround, atomic groups and
    possessive repeats are refused, so are patterns of more than MOST_STATES states. Raises ConfigError, with `where`."""

    def __init__(self, pattern: str, where: str = "pattern") -> None:
        self._where = f"{where}: '{pattern}'"
        self._states: list[tuple[Callable[..., Any] | None, list[int]]] = [(None, [])]  # 0 is the end: the pattern was found
        self._tests: set[int] = set()  # states that a character passes; the others cost none
        self._anchored = False
        self._work = 0
        try:
            tree = _parser.parse(pattern)
        except (re.error, RecursionError, OverflowError) as problem:
            raise ConfigError(f"{self._where}: expected a regular expression, found an error: {problem}.") from None
        self._start = self._chain(tree, tree.state.flags, 0)
        self._moves: dict[tuple[frozenset[int], Any], frozenset[int] | None] = {}

    def found(self, text: str) -> bool:
        """Whether the pattern occurs anywhere in the text."""
        states: frozenset[int] | None = frozenset()
        for place in range(len(text) + 1):
            # Anchors look one character back and, as $ does before a last line break, two ahead.
            window = text[max(0, place - 1) : place + 2] if self._anchored else text[place : place + 1]
            key = (states, (window, place > 0) if self._anchored else window)
            moves = self._moves  # other threads use it too: it is exchanged, and never shrinks
            if key not in moves:
                if len(moves) >= KEPT_TRANSITIONS:
                    moves = self._moves = {}
                moves[key] = self._move(states or frozenset(), text[place : place + 1], window, int(place > 0))
            states = moves[key]
            if states is None:
                return True
        return False

    def _move(self, states: frozenset[int], character: str, window: str, before: int) -> frozenset[int] | None:
        """The states after the character, a match that begins here included; None where the pattern is found."""
        waiting, seen = [self._start, *states], {self._start, *states}
        after = set()
        while waiting:
            state = waiting.pop()
            if state == 0:
                return None
            test, following = self._states[state]
            if state in self._tests:
                if character and test is not None and test(character):
                    after.update(following)
            elif test is None or test(window, before):
                waiting += [one for one in following if one not in seen]
                seen.update(following)
        return frozenset(after)

    def _chain(self, items: Sequence[Any], flags: int, after: int) -> int:
        self._work += 1
        if self._work > 10 * MOST_STATES:
            raise ConfigError(f"{self._where}: expected at most {MOST_STATES} states, found more; make it simpler.")
        for operation, argument in reversed(items):
            after = self._item(str(operation), operation, argument, flags, after)
        return after

    def _item(self, name: str, operation: Any, argument: Any, flags: int, after: int) -> int:
        """The state in which an item of the pattern begins that ends in the state `after`."""
        if name in CHARACTERS:
            state = self._add(self._compiled(operation, argument, flags).match, [after])
            self._tests.add(state)
            return state
        if name == "AT":
            self._anchored = True
            return self._add(self._compiled(operation, argument, flags).match, [after])
        if name == "BRANCH":
            return self._add(None, [self._chain(one, flags, after) for one in argument[1]])
        if name == "SUBPATTERN":
            _, added, removed, items = argument
            return self._chain(items, (flags | added) & ~removed, after)
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            return self._repeat(*argument, flags, after)
        raise ConfigError(
            f"{self._where}: expected a regular expression without references, lookaround, atomic groups and possessive repeats, "
            f"found {name.lower()}: it could not be searched for in linear time."
        )

    def _repeat(self, least: int, most: int, items: Sequence[Any], flags: int, after: int) -> int:
        if most == _parser.MAXREPEAT:
            entry = self._add(None, [after])
            self._states[entry][1].append(self._chain(items, flags, entry))
        else:
            entry = after
            for _ in range(most - least):
                entry = self._add(None, [self._chain(items, flags, entry), after])
        for _ in range(least):
            entry = self._chain(items, flags, entry)
        return entry

    def _add(self, test: Callable[..., Any] | None, following: list[int]) -> int:
        if len(self._states) >= MOST_STATES:
            raise ConfigError(f"{self._where}: expected at most {MOST_STATES} states, found more; make it simpler.")
        self._states.append((test, following))
        return len(self._states) - 1

    def _compiled(self, operation: Any, argument: Any, flags: int) -> re.Pattern[str]:
        """One character or anchor, as `re` itself understands it."""
        compiled: re.Pattern[str] = _compiler.compile(_parser.SubPattern(_parser.State(), [(operation, argument)]), flags)
        return compiled
