"""Problems made by rule: families of questions, each with the working that solves it."""

from __future__ import annotations

import operator
import random
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from rlflow.errors import ConfigError
from rlflow.types import Task

Say = Callable[[str, Fraction], Fraction]
"""Writes `3 + 4` and its value as a line of the working; returns the value that was written."""
Numbers = Sequence[int]
OPERATIONS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
}
SHARE_OF_VAL = 4  # every fourth question is for validation
MOST_DRAWS = 10_000  # for a question of the split


@dataclass(frozen=True)
class Family:
    """Questions of one form. words: with {} for each number. draw: the numbers, of at most that
    size. steps: of the working, on the numbers a, b, c and on the results x, y, z of earlier steps;
    nothing is said of a division by //. The last one gives the answer."""

    name: str
    words: str
    draw: Callable[[random.Random, int], Numbers]
    steps: Sequence[str]

    def numbers(self, text: str) -> list[int] | None:
        """Those of the first question of this family in a text; None without one."""
        pattern = re.escape(self.words).replace(re.escape("{}"), r"(-?\d{1,9})")
        match = re.search(pattern, text)
        return [int(one) for one in match.groups()] if match else None

    def work(self, say: Say, numbers: Numbers) -> Fraction:
        """Says the steps, and returns the answer."""
        values = dict(zip("abc", map(Fraction, numbers)))
        for name, step in zip("xyz", self.steps):
            left, sign, right = step.split()
            over, by = (Fraction(values.get(one, one)) for one in (left, right))
            found = Fraction(OPERATIONS[sign](over, by))
            values[name] = found if sign == "//" else say(f"{over} {sign} {by}", found)
        return values[name]


def _three(drawn: random.Random, top: int) -> Numbers:
    return [drawn.randint(1, top) for _ in range(3)]


def _remainder_numbers(drawn: random.Random, top: int) -> Numbers:
    by = drawn.randint(5, max(5, top))  # below, an answer would be guessed too often
    return [drawn.randint(1, top) * by + drawn.randrange(by), by]


def _equation_numbers(drawn: random.Random, top: int) -> Numbers:
    a, b, x = drawn.randint(2, max(2, top)), drawn.randint(1, top), drawn.randint(1, top)
    return [a, b, a * x + b]


def _sequence_numbers(drawn: random.Random, top: int) -> Numbers:
    first, step = drawn.randint(1, top), drawn.randint(1, top)
    return [first + number * step for number in range(3)]


def _percent_numbers(drawn: random.Random, top: int) -> Numbers:
    return [10 * drawn.randint(1, 9), 10 * drawn.randint(1, top)]


def _fraction_numbers(drawn: random.Random, top: int) -> Numbers:
    return [drawn.randint(1, top), drawn.randint(1, top), drawn.randint(2, max(2, top))]


FAMILIES = (
    Family("sum", "{} + {} + {}", _three, ("a + b", "x + c")),
    Family("difference", "{} + {} - {}", _three, ("a + b", "x - c")),
    Family("product", "{} * {} + {}", _three, ("a * b", "x + c")),
    Family("remainder", "{} mod {}", _remainder_numbers, ("a // b", "x * b", "a - y")),
    Family("equation", "x with {}x + {} = {}", _equation_numbers, ("c - b", "x / a")),
    Family("sequence", "the number after {}, {}, {}", _sequence_numbers, ("b - a", "c + x")),
    Family("percent", "{}% of {}", _percent_numbers, ("a // 10", "b / 10", "y * x")),
    Family("fraction", "({} + {}) / {}", _fraction_numbers, ("a + b", "x / c")),
)


def text_of(value: Fraction) -> str:
    r"""`-3`, or `\frac{3}{4}`."""
    if value.denominator == 1:
        return str(value.numerator)
    sign = "-" if value < 0 else ""
    return f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def silent(text: str, value: Fraction) -> Fraction:
    """A `Say` that writes nothing."""
    return value


def made_tasks(
    split: str, count: int, families: Sequence[str], highest: int, seed: int, prompt: str
) -> list[Task]:
    """Tasks of these families in turn; no question is in both splits. Raises
    ConfigError."""
    named = {family.name: family for family in FAMILIES}
    chosen = [named[name] for name in families]
    return [
        _made_task(f"{split}-{number}", chosen[number % len(chosen)], split, highest, seed, prompt)
        for number in range(count)
    ]


def _made_task(name: str, family: Family, split: str, highest: int, seed: int, prompt: str) -> Task:
    drawn = random.Random(f"{seed}/{name}")
    for _ in range(MOST_DRAWS):
        numbers = family.draw(drawn, highest)
        question = family.words.format(*numbers)
        if (zlib.crc32(question.encode()) % SHARE_OF_VAL == 0) == (split == "val"):
            break
    else:
        raise ConfigError(
            f"environment.highest: expected more than {highest}, of which '{family.name}' makes no "
            f"question for {split}."
        )
    answer = text_of(family.work(silent, numbers))
    return Task(name, prompt.replace("{question}", question), answer, {"family": family.name})
