r"""Answers in responses: the last \boxed{}, and plain numbers compared exactly."""

from __future__ import annotations

import re
from fractions import Fraction

_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_NUMBER = re.compile(
    r"(?P<sign>[+-]?)(?:\\[dt]?frac\{(?P<over>\d{1,30})\}\{(?P<under>\d{1,30})\}"
    r"|(?P<plain>\d{1,30}|\d{1,3}(?:,\d{3}){1,9}|(?=\.\d))(?P<decimals>\.\d{0,30})?"
    r"(?:/(?P<by>\d{1,30}))?)",
    re.ASCII,
)
_SHORT = re.compile(r"frac(\d)(\d)", re.ASCII)  # \frac12
LAST_LINE = "answer:"
_LAST_LINE = re.compile(LAST_LINE, re.IGNORECASE | re.ASCII)


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{}` that is closed, of nested ones the innermost; None
    without one. In time linear in the text."""
    opened: list[int] = []  # where the content of each open brace begins, below 0 without \boxed
    found = (-1, -1)
    for mark in _BRACES.finditer(text):
        if mark[0] == "{":
            opened.append(-1)
        elif mark[0] == "}" and opened:
            start = opened.pop()
            found = (start, mark.start()) if start > found[0] else found
        elif mark[0].startswith("\\boxed"):
            opened.append(mark.end())
    return text[slice(*found)].strip() if found[0] >= 0 else None


def on_last_line(text: str) -> str | None:
    """What follows the last `Answer:`, to the end of its line; None without one."""
    starts = [mark.end() for mark in _LAST_LINE.finditer(text)]
    line = text[starts[-1] :].split("\n", 1)[0] if starts else ""
    return line.strip().rstrip("$*. ").lstrip("$* ") or None


def number(text: str) -> Fraction | None:
    r"""The value of a plain number (`-1,234`, `.5`, `3/4`, `\frac{3}{4}`, `\frac34`); None for
    anything else."""
    match = _NUMBER.fullmatch(_SHORT.sub(r"frac{\1}{\2}", text.replace("−", "-").strip()))
    if match is None:
        return None
    sign = -1 if match["sign"] == "-" else 1
    if match["over"]:
        over, under = match["over"], int(match["under"])
    else:
        over = match["plain"].replace(",", "") + (match["decimals"] or "").rstrip(".")
        under = int(match["by"] or 1)
    return sign * Fraction(over) / under if under else None
