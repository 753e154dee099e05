"""Tasks for programs: a function to write, and the cases on which it is tried."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from rlflow.types import Task

PROMPT = (
    "Write a Python function f(xs) of a list of whole numbers. Rule: {rule}.\nFor example "
    "{examples}.\n<python>program</python> runs a program and shows what it prints, "
    "<answer>program</answer> gives the function.\n"
)
CASES, SHARE_OF_VAL = 12, 4  # every fourth rule is for validation


@dataclass(frozen=True)
class Transformation:
    """One step of a rule. words and expression: with {n}, a number from 2 to 9."""

    words: str
    expression: str


TRANSFORMATIONS = (
    Transformation("add {n} to each", "[x + {n} for x in xs]"),
    Transformation("take each {n} times", "[x * {n} for x in xs]"),
    Transformation("keep those above {n}", "[x for x in xs if x > {n}]"),
    Transformation("drop multiples of {n}", "[x for x in xs if x % {n}]"),
    Transformation("keep the first {n}", "xs[:{n}]"),
    Transformation("drop the last {n}", "xs[:-{n}]"),
    Transformation("sort them", "sorted(xs)"),
    Transformation("reverse their order", "xs[::-1]"),
)
Step = tuple[Transformation, int]


def rule_of(steps: Sequence[Step]) -> str:
    """`sort them, then add 3 to each`."""
    return ", then ".join(step.words.format(n=n) for step, n in steps)


def solution_of(steps: Sequence[Step]) -> str:
    """The program that follows a rule, a line per step."""
    lines = [f"    xs = {step.expression.format(n=n)}\n" for step, n in steps]
    return f"def f(xs):\n{''.join(lines)}    return xs\n"


def made_tasks(split: str, count: int, depth: int, examples: int, seed: int) -> list[Task]:
    """Tasks of rules of `depth` steps; no rule is in both splits."""
    return [
        _made_task(f"{split}-{number}", split, depth, examples, seed) for number in range(count)
    ]


def _made_task(name: str, split: str, depth: int, examples: int, seed: int) -> Task:
    drawn = random.Random(f"{seed}/{name}")
    while True:
        kinds = drawn.sample(TRANSFORMATIONS, depth)
        steps = [(kind, drawn.randint(2, 9)) for kind in kinds]
        rule = rule_of(steps)
        if (zlib.crc32(f"rule {rule}".encode()) % SHARE_OF_VAL == 0) != (split == "val"):
            continue
        solution = solution_of(steps)
        exec(solution, made := {})
        inputs = [
            [drawn.randint(-20, 40) for _ in range(drawn.randint(4, 12))]
            for _ in range(examples + CASES)
        ]
        cases = [([numbers], made["f"](numbers)) for numbers in inputs]
        results = {json.dumps(result) for _, result in cases[examples:]}
        if len(results) > CASES // 2:  # else one answer would be right too often
            break
    shown = ", ".join(f"f({arguments[0]}) = {result}" for arguments, result in cases[:examples])
    prompt = PROMPT.format(rule=rule, examples=shown)
    metadata = {"function": "f", "cases": cases[examples:]}
    return Task(name, prompt, solution, metadata)
