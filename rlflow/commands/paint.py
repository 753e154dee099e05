"""Colours of text in a terminal."""

from __future__ import annotations

import os
import sys

_CODES = {
    "bold": "1",
    "dim": "2",
    "policy": "36",
    "good": "32",
    "bad": "31",
    "warn": "33",
    "marked": "30;43",
}


class Paint:
    """Text in colour where colour is wanted: `auto` is on a terminal, unless NO_COLOR is set."""

    def __init__(self, color: str) -> None:
        terminal = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        self.on = color == "always" or (color == "auto" and terminal)

    def __call__(self, text: str, *styles: str) -> str:
        """The text with the styles around each of its lines, so that pagers keep them."""
        if not self.on or not text:
            return text
        start = f"\033[{';'.join(_CODES[style] for style in styles)}m"
        return "\n".join(f"{start}{line}\033[0m" if line else line for line in text.split("\n"))
