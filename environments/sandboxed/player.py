"""A scripted player of the made tasks of `python`, for the first lessons of a tiny policy."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from rlflow_environments.sandboxed.tasks import TRANSFORMATIONS, Step, solution_of

RIGHT = 0.2  # chance of each step of a clumsy player


def play(
    prompt: str, turns: Sequence[tuple[str, str]], generator: random.Random, clumsy: bool
) -> str:
    """The answer that follows the rule of the prompt; a clumsy one mixes up the steps' kinds."""
    rule = re.findall(r"Rule: (.*)\.\n", prompt)[-1]
    steps = [_read(words) for words in rule.split(", then ")]
    if clumsy:
        steps = [
            (kind if generator.random() < RIGHT else generator.choice(TRANSFORMATIONS), number)
            for kind, number in steps
        ]
    return f"<answer>\n{solution_of(steps)}</answer>"


def _read(words: str) -> Step:
    number = int((re.findall(r"\d+", words) or ["2"])[0])
    kind = next(one for one in TRANSFORMATIONS if one.words.format(n=number) == words)
    return kind, number
