"""Episodes in a terminal while they are played: one alone, or two beside each other."""

from __future__ import annotations

import itertools
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from rlflow.commands.paint import Paint
from rlflow.texts import printable

TAG = re.compile(r"</?([a-z_]+)>")
THOUGHT = ("think", "thought", "thinking", "reasoning")
COLLAPSED_LINES = 4
LONGEST_TAG = 24


class Conversation:
    """One episode: responses in colour with thoughts dim, observations collapsed unless `whole`.

    live: printed at once. turns: (response so far, observation before it). changed: called at
    every change."""

    def __init__(
        self,
        paint: Paint,
        *,
        live: bool,
        whole: bool = False,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.turns: list[tuple[str, str]] = []
        self.ended = ""
        self.whole = whole
        self._paint, self._live, self._changed = paint, live, changed
        self._answered = True
        self._printed = 0
        self._tag = ""
        self._observation: str | None = None

    def shown(self, text: str) -> None:
        """Takes what the policy reads next; the first is the prompt, which the person knows."""
        first = self._observation is None
        self._observation = "" if first else text
        self._printed, self._tag = 0, ""
        if not first and self._live:
            lines = [f"  │ {line}" for line in collapsed(text, self._width() - 4, self.whole)]
            print(self._paint("\n".join(lines), "dim"), flush=True)

    def said(self, text: str, ended: bool) -> None:
        """Takes the response so far."""
        if self._live:
            stop = len(text) if ended else _safe_end(text)
            for part, styles in self._styled(text[self._printed : stop]):
                print(self._paint(printable(part), *styles), end="", flush=True)
            self._printed = max(self._printed, stop)
        if not self._answered:
            self.turns.pop()
        self.turns.append((text, self._observation or ""))
        self._answered = ended
        if ended and self._live:
            print(flush=True)
        self._changed()

    def finish(self, stop: str, error: str) -> None:
        """The episode ended."""
        cut = "" if stop == "terminated" else f"cut: {stop}"
        kind = "aborted" if stop == "aborted" else "unscorable"
        self.ended = f"{kind}: {error}" if error else cut
        if self.ended and self._live:
            print(self._paint(printable(self.ended), "warn"))
        self._changed()

    def _styled(self, text: str) -> list[tuple[str, tuple[str, ...]]]:
        """The text in parts with their styles; remembers the tag that it stands in."""
        parts: list[tuple[str, tuple[str, ...]]] = []
        place = 0
        for tag in TAG.finditer(text):
            parts += [(text[place : tag.start()], self._style()), (tag[0], ("dim",))]
            self._tag = "" if tag[0].startswith("</") else tag[1]
            place = tag.end()
        return [(part, styles) for part, styles in [*parts, (text[place:], self._style())] if part]

    def _style(self) -> tuple[str, ...]:
        if self._tag in THOUGHT:
            return ("dim",)
        return ("policy", "bold") if self._tag else ("policy",)

    @staticmethod
    def _width() -> int:
        return shutil.get_terminal_size((80, 24)).columns


def collapsed(text: str, width: int, whole: bool = False) -> list[str]:
    """An observation's first lines, cut to the width; all of them, wrapped, where `whole`."""
    lines = [" ".join(line.split()) for line in printable(text).splitlines() if line.strip()]
    if whole:
        return [part for line in lines for part in textwrap.wrap(line, width) or [""]]
    kept = lines[:COLLAPSED_LINES]
    short = [line if len(line) <= width else f"{line[: width - 1]}…" for line in kept]
    rest = len(lines) - len(short)
    if rest:
        short.append(f"… {rest} more line{'s' if rest > 1 else ''}; --full shows them")
    return short


class Columns:
    """Conversations beside each other: redrawn at every change on a terminal, printed at the
    end."""

    def __init__(
        self,
        names: Sequence[str],
        paint: Paint,
        *,
        whole: bool = False,
    ) -> None:
        self.heard = [
            (name, Conversation(paint, live=False, whole=whole, changed=self._draw))
            for name in names
        ]
        self._paint = paint
        self._screen: Any = None

    def __enter__(self) -> Columns:
        if sys.stdout.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(file=sys.stdout, force_terminal=True)
            self._screen = Live(
                console=console, auto_refresh=False, transient=True, redirect_stdout=False
            )
            self._screen.start()
        return self

    def __exit__(self, *failure: object) -> None:
        if self._screen is not None:
            self._screen.stop()
        print(side_by_side(self.heard, self._paint))

    def _draw(self) -> None:
        """The end of what is told, as much as the terminal has lines for."""
        if self._screen is not None:
            from rich.text import Text

            room = max(1, shutil.get_terminal_size((80, 24)).lines - 2)
            lines = side_by_side(self.heard, self._paint).split("\n")
            self._screen.update(Text.from_ansi("\n".join(lines[-room:])), refresh=True)


def side_by_side(heard: Sequence[tuple[str, Conversation]], paint: Paint) -> str:
    """The conversations in columns of equal width, turn beside turn."""
    width = shutil.get_terminal_size((80, 24)).columns
    room = (width - 3 * (len(heard) - 1)) // len(heard)
    rows = [_row([[name] for name, _ in heard], room, paint, "bold")]
    for turns in itertools.zip_longest(*(conversation.turns for _, conversation in heard)):
        shown = [
            collapsed(turn[1], room, told.whole) if turn else []
            for turn, (_, told) in zip(turns, heard, strict=True)
        ]
        said = [_wrapped(printable(turn[0]), room) if turn else [] for turn in turns]
        rows += [_row(shown, room, paint, "dim"), _row(said, room, paint, "policy")]
    ends = [_wrapped(printable(conversation.ended), room) for _, conversation in heard]
    rows.append(_row(ends, room, paint, "warn"))
    return "\n".join(row for row in rows if row)


def _row(cells: Sequence[Sequence[str]], room: int, paint: Paint, style: str) -> str:
    lines = itertools.zip_longest(*cells, fillvalue="")
    return "\n".join(" │ ".join(paint(f"{part:<{room}}", style) for part in line) for line in lines)


def _wrapped(text: str, width: int) -> list[str]:
    return [part for line in text.splitlines() for part in textwrap.wrap(line, width)]


def _safe_end(text: str) -> int:
    """The end of what can be printed: before a tag that is still being written."""
    opened = text.rfind("<")
    unfinished = opened >= 0 and ">" not in text[opened:] and len(text) - opened < LONGEST_TAG
    return opened if unfinished else len(text)
