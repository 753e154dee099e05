r"""Answers in responses: in a \boxed{}, behind `####`, between tags, on a last line; and plain
numbers compared exactly."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from rlflow_environments.common.blocks import blocks

_BRACES = re.compile(
    r"\\(?:boxed|fbox)(?![A-Za-z])"
    r"(?:\s*\{|[ \t]*(?P<bare>[+-]?\d{1,30}(?:,\d{3}){0,9}(?:[./]\d{1,30})?|[A-Za-z]\b))"
    r"|\\.|[{}]",
    re.DOTALL | re.ASCII,
)
_NUMBER = re.compile(
    r"(?P<sign>[+-]?)(?:\\[dt]?frac\{(?P<over>\d{1,30})\}\{(?P<under>\d{1,30})\}"
    r"|(?P<plain>\d{1,30}|\d{1,3}(?:,\d{3}){1,9}|(?=\.\d))(?P<decimals>\.\d{0,30})?"
    r"(?:/(?P<by>\d{1,30}))?)",
    re.ASCII,
)
_SHORT = re.compile(r"frac(\d)(\d)", re.ASCII)  # \frac12
LAST_LINE = "answer:"
_LAST_LINE = re.compile(LAST_LINE, re.IGNORECASE | re.ASCII)
HASHES = "####"
_HASHES = re.compile(r"(?<!#)####(?!#)")


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{}` or `\fbox{}` that is closed, of nested ones the innermost;
    a number or letter that follows without braces (`\boxed 7`) is one too. None without any. In
    time linear in the text."""
    opened: list[int] = []  # where the content of each open brace begins, below 0 without \boxed
    found = (-1, -1)
    for mark in _BRACES.finditer(text):
        if mark[0] == "{":
            opened.append(-1)
        elif mark[0] == "}" and opened:
            start = opened.pop()
            found = (start, mark.start()) if start > found[0] else found
        elif mark["bare"]:
            found = mark.span("bare")  # later than all before
        elif mark[0].startswith(("\\boxed", "\\fbox")):
            opened.append(mark.end())
    return text[slice(*found)].strip() if found[0] >= 0 else None


def on_last_line(text: str) -> str | None:
    """What follows the last `Answer:`, to the end of its line; None without one."""
    return _behind_last(_LAST_LINE, text)


def behind_hashes(text: str) -> str | None:
    """What follows the last `####`, to the end of its line; None without one."""
    return _behind_last(_HASHES, text)


def in_tags(text: str) -> str | None:
    """What the last `<answer>...</answer>` holds; None without one."""
    return ["", *blocks("answer", text)][-1].strip() or None


def _behind_last(mark: re.Pattern[str], text: str) -> str | None:
    starts = [found.end() for found in mark.finditer(text)]
    line = text[starts[-1] :].split("\n", 1)[0] if starts else ""
    return line.strip().rstrip("$*. ").lstrip("$* ") or None


@dataclass(frozen=True)
class AnswerForm:
    """How a response gives its answer. marks: a prompt that asks for this form has one of them.
    written: with {} for the answer."""

    marks: tuple[str, ...]
    read: Callable[[str], str | None]
    written: str


BOX = AnswerForm(("boxed", "\\fbox"), boxed, "\\boxed{{{}}}")
LINE = AnswerForm((LAST_LINE,), on_last_line, "Answer: {}")
OTHERS = (
    AnswerForm((HASHES,), behind_hashes, "#### {}"),
    AnswerForm(("<answer>",), in_tags, "<answer>{}</answer>"),
)


def forms_of(prompt: str) -> tuple[AnswerForm, ...]:
    """The forms in which a response to the prompt may answer, the one that counts first: those that
    it asks for, and a box in any case; a last line counts where there is no box."""
    lower = prompt.lower()
    asked = [form for form in (BOX, *OTHERS) if any(mark in lower for mark in form.marks)]
    line = [LINE] if LAST_LINE in lower else []
    return tuple(dict.fromkeys([*asked, BOX, *line]))


def asked_form(prompt: str) -> AnswerForm | None:
    """The first form that is read and that the prompt asks for."""
    lower = prompt.lower()
    known = (BOX, *OTHERS, LINE)
    return next((form for form in known if any(mark in lower for mark in form.marks)), None)


def answer_in(response: str, forms: tuple[AnswerForm, ...]) -> str | None:
    """The one answer of a response, in the first of the forms that it has; None without any."""
    said = next(filter(None, (form.read(response) for form in forms)), None)
    return None if said is None else boxed(said) or said


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
