"""Texts and names of others (agents, servers, tasks, policies), before a terminal or a file has
them: without control characters, of bounded length and number."""

from __future__ import annotations

import re
from collections.abc import Iterable

LONGEST_LINE = 4_000  # characters
LONGEST_NAME = 100  # characters
MOST_NAMES = 200
"""Of one thing's numbers. A run of a thousand metrics is read by nobody and fills its files."""
_STYLE = re.compile(r"\x1b\[[0-7;]{1,8}m")
"""Colours and weights; not `conceal`, which is 8."""
_NAME = re.compile(rf"[\w.+@()#%:=<>,][\w.+@()#%:=<>,/ -]{{0,{LONGEST_NAME - 1}}}")


def printable(text: str) -> str:
    """The text without control characters and halves of emoji, which no document may hold."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        letter if letter in "\n\t" or letter.isprintable() else "\ufffd" for letter in text
    )


def printable_styled(text: str) -> str:
    """The printable text with the colours that it has: what `Paint` makes, of texts of others
    too."""
    styles = [*_STYLE.findall(text), ""]
    parts = map(printable, _STYLE.split(text))
    return "".join(part + style for part, style in zip(parts, styles, strict=True))


def one_line(text: str, most: int = LONGEST_LINE) -> str:
    """The printable text in one line of at most `most` characters, without the middle of a longer
    one."""
    if len(text) > most:
        half = most // 2
        text = f"{text[:half]} [...] {text[-half:]}"
    return printable(" ".join(text.split()))


def wrong_name(names: Iterable[object]) -> str:
    """What is wrong with the names of somebody's numbers; "" where nothing is. They become lines of
    a terminal and columns of a file."""
    for count, name in enumerate(names):
        if count == MOST_NAMES:
            return f"more than {MOST_NAMES} names"
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            expected = f"expected letters, digits, . _ - / and at most {LONGEST_NAME} characters"
            return f"the name {one_line(repr(name), 60)}; {expected}"
    return ""
