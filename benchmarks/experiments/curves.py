"""Pictures of learning curves, and what they end with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.base import Results
from experiments.reports import COLORS

MORE_COLORS = (*COLORS, "#111111", "#c0392b")


def at_the_end(curve: Sequence[float]) -> float:
    """The mean of the last quarter of a curve."""
    last = curve[-max(1, round(0.25 * len(curve))) :]
    return sum(last) / len(last)


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Each value's mean with those before it, `window` in all."""
    parts = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return [sum(part) / len(part) for part in parts]


def curves(name: str, xlabel: str = "step", ylabel: str = "", window: int = 5) -> Any:
    """A picture with a line per arm, each point the mean of the `window` steps up to it: the mean over seeds, and the range."""

    def drawn(axes: Any, results: Results) -> None:
        for color, (arm, found) in zip(MORE_COLORS, results.items(), strict=False):
            rows = [smoothed(figures[name], window) for figures in found]
            count = min(map(len, rows))
            columns = [[row[place] for row in rows] for place in range(count)]
            places = range(1, count + 1)
            axes.fill_between(
                places,
                list(map(min, columns)),
                list(map(max, columns)),
                color=color,
                alpha=0.12,
                linewidth=0,
            )
            axes.plot(
                places, [sum(column) / len(column) for column in columns], color=color, label=arm
            )
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel or name.replace("_", " "))
        axes.legend(fontsize=8)

    return drawn
