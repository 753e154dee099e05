"""A scripted player of the made problems, for the first lessons of a tiny policy."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction

from rlflow_environments.mathematics.problems import FAMILIES, text_of

SLIPS, CHANCES = (0, 1, -1, 2), (0.3, 0.4, 0.2, 0.1)
"""How far a clumsy player's values are off: most often by one, so that the likeliest is wrong."""


def play(
    prompt: str, turns: Sequence[tuple[str, str]], generator: random.Random, clumsy: bool
) -> str:
    r"""The steps, and the answer in `\boxed{}`; a clumsy player writes other values."""
    numbers, family = next(
        (found, one) for one in FAMILIES if (found := one.numbers(prompt)) is not None
    )
    lines: list[str] = []

    def say(text: str, value: Fraction) -> Fraction:
        value += generator.choices(SLIPS, CHANCES)[0] if clumsy else 0
        lines.append(f"{text} = {text_of(value)}")
        return value

    answer = family.work(say, numbers)
    return f"{', '.join(lines)}: \\boxed{{{text_of(answer)}}}\n"
