"""A scripted player of pages whose task is said in words: what to click, what to type where."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

RIGHT = 0.3  # chance of a clumsy player's right action
FIRST = 0.65  # else: of the first element
FIELDS = ("input", "textarea")
CLICKABLE = ("button", "a", "span", "checkbox", "radio", "h3", "div", "label")
ENDS = ("submit", "login", "ok", "search")
_LINE = re.compile(r'^(\d+) ([a-z0-9]+) "(.*)"(?: (on|off))?', re.MULTILINE)
_QUOTED = re.compile(r'"([^"]*)"')


def play(
    prompt: str, turns: Sequence[tuple[str, str]], generator: random.Random, clumsy: bool
) -> str:
    """The next action of the task; a clumsy one mostly clicks the first element, or acts on any."""
    goal = re.findall(r"^Task: (.*)$", prompt, re.MULTILINE)[-1]
    page = turns[-1][1] if turns else prompt
    elements = [(int(number), *rest) for number, *rest in _LINE.findall(page)]
    done = [response.strip() for response, _ in turns]
    if clumsy and generator.random() > RIGHT:
        return _anything(elements, goal, generator)
    return _next(goal, elements, done)


Element = tuple[int, str, str, str]


def _next(goal: str, elements: Sequence[Element], done: Sequence[str]) -> str:
    fields = [one for one in elements if one[1] in FIELDS]
    texts = _QUOTED.findall(goal)
    empty = [one for one in fields if not one[2]]
    typed = {one[2] for one in fields}
    if fields and texts and empty and re.match(r"(?i)enter|type", goal):
        wanted = next((text for text in texts if text not in typed), None)
        if wanted is not None:
            return f"type {empty[0][0]} {wanted}\n"
    for name in _targets(goal, texts)[len([one for one in done if one.startswith("click")]) :]:
        for number, kind, text, state in elements:
            if kind in CLICKABLE and text.lower() == name.lower() and state != "on":
                return f"click {number}\n"
    ends = [one for one in elements if one[1] == "button" and one[2].lower() in ENDS]
    chosen = ends or [one for one in elements if one[1] in (*CLICKABLE, *FIELDS)]
    return f"click {chosen[0][0]}\n" if chosen else "scroll down\n"


def _targets(goal: str, texts: Sequence[str]) -> list[str]:
    """What is to be clicked, in order."""
    if texts and not re.match(r"(?i)enter|type", goal):
        return list(texts)
    return re.findall(r"button ([A-Z]+)\b", goal)


def _anything(elements: Sequence[Element], goal: str, generator: random.Random) -> str:
    if not elements:
        return "scroll down\n"
    number, kind, *_ = generator.choice(elements)
    if generator.random() < FIRST:
        return f"click {elements[0][0]}\n"
    texts = _QUOTED.findall(goal)
    if kind in FIELDS and texts:
        return f"type {number} {generator.choice(texts)}\n"
    return f"click {number}\n"
