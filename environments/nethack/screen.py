"""The text that a policy reads of NetHack: message, map, stairs, and the line of the status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NOTHING = "(no message)"
LANDMARKS = "><"
Places = dict[str, tuple[int, int]]
"""Landmark -> (column, row), as it was seen last on this level."""


def text_of(view: Mapping[str, Any], window: int | None, known: Places) -> str:
    """The view's lines. window: columns and rows on each side of the player that are shown; none:
    the whole map. known: landmarks of the level, which is brought up to date."""
    known.update(_landmarks(view["rows"]))
    single = [one for one in view["said"] if "\n" not in one]
    lists = [one for one in view["said"] if "\n" in one]
    lines = [" ".join(single) or NOTHING, *lists]
    if window is None:
        lines += _whole(view["rows"])
    else:
        lines += _window(view["rows"], *view["at"], window)
        if known:
            lines.append(", ".join(_way(mark, view["at"], place) for mark, place in known.items()))
    return "".join(f"{line}\n" for line in (*lines, view["status"]))


def _window(rows: list[str], column: int, row: int, size: int) -> list[str]:
    blank = " " * (len(rows[0]) + 2 * size)
    padded = [blank] * size + [f"{' ' * size}{one}{' ' * size}" for one in rows] + [blank] * size
    shown = padded[row : row + 2 * size + 1]
    return [one[column : column + 2 * size + 1].rstrip() for one in shown]


def _whole(rows: list[str]) -> list[str]:
    filled = [number for number, row in enumerate(rows) if row.strip()] or [0]
    return [row.rstrip() for row in rows[filled[0] : filled[-1] + 1]]


def _landmarks(rows: list[str]) -> Places:
    found = {}
    for mark in LANDMARKS:
        for number, row in enumerate(rows):
            if mark in row:
                found[mark] = (row.index(mark), number)
    return found


def _way(mark: str, at: list[int], place: tuple[int, int]) -> str:
    """`> 3 east 2 south`, or `> here`."""
    east, south = place[0] - at[0], place[1] - at[1]
    words = [f"{abs(east)} {'east' if east > 0 else 'west'}"] if east else []
    words += [f"{abs(south)} {'south' if south > 0 else 'north'}"] if south else []
    return f"{mark} {' '.join(words) or 'here'}"
