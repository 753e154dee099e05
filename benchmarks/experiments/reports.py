"""What is told of an experiment: a table, a verdict, a picture, and the blocks of a page that hold them."""

from __future__ import annotations

import math
import re
import statistics
from pathlib import Path
from typing import Any

from experiments.base import Experiment, Figures, Results, average, values
from rlflow.errors import MissingPackageError
from rlflow.storage.files import replacing

_INK, _QUIET, _GRID = "#1f2933", "#7b8794", "#e4e7eb"
COLORS = ("#1f6fb2", "#d9730d", "#3f8f4f", "#8a5fa8", "#7b8794")
MARKERS = ("o", "s", "^", "D", "v")


def number(value: float) -> str:
    """Three digits that count."""
    return "NaN" if math.isnan(value) else f"{value:.3g}"


def shown(found: list[float]) -> str:
    """The mean over seeds, and from where to where they go; a dash where no seed has the figure."""
    if all(math.isnan(value) for value in found):
        return "-"
    center = number(statistics.fmean(found))
    return center if len(found) == 1 else f"{center} ({number(min(found))} to {number(max(found))})"


def table(experiment: Experiment, results: Results) -> str:
    """A Markdown table with a row per arm: means over seeds, and the least and the greatest."""
    titles = [name.replace("_", " ") for name in experiment.columns]
    lines = ["| " + " | ".join(["arm", *titles]) + " |", "|---" * (len(titles) + 1) + "|"]
    for arm in results:
        cells = [shown(values(results, arm, name)) for name in experiment.columns]
        lines.append("| " + " | ".join([arm, *cells]) + " |")
    return "\n".join(lines)


def said(verdict: tuple[bool, str]) -> str:
    """The verdict in words."""
    reproduces, why = verdict
    return f"reproduces: {why}" if reproduces else f"does not: {why}"


def section(experiment: Experiment, results: Results, verdict: str, picture: str | None) -> str:
    """All of an experiment as Markdown. picture: where its page finds the image."""
    parts = [
        f"## {experiment.system}",
        f"**Claim.** {experiment.claim}",
        f"**Set-up.** {experiment.setup}",
        f"**Rule.** {experiment.rule}",
        table(experiment, results),
        f"**Verdict: {verdict}**",
        *([f"![{experiment.name}]({picture})"] if picture else []),
    ]
    return "\n\n".join(parts) + "\n"


def summary(experiment: Experiment, results: Results) -> dict[str, Figures]:
    """{arm: {figure: mean, low, high}}, for the last line."""
    found: dict[str, Figures] = {}
    for arm in results:
        by_name = {name: values(results, arm, name) for name in experiment.columns}
        found[arm] = {
            name: {"mean": statistics.fmean(one), "low": min(one), "high": max(one)}
            for name, one in by_name.items()
        }
    return found


def with_block(page: str, name: str, content: str) -> str:
    """The page with the block of that name exchanged, or added at its end."""
    begin, end = f"<!-- {name}: written by a script -->", f"<!-- {name}: end -->"
    block = f"{begin}\n{content.strip()}\n{end}"
    whole = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if whole.search(page):
        return whole.sub(lambda _: block, page)
    return f"{page.rstrip()}\n\n{block}\n"


def draw(experiment: Experiment, results: Results, path: Path) -> None:
    """Writes the picture of an experiment, a PNG of some 30 kB. Raises MissingPackageError without matplotlib."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingPackageError(
            "pictures: the package 'matplotlib' is not installed: pip install matplotlib."
        ) from None
    style: Any = {
        "font.family": "DejaVu Sans", "font.size": 9, "text.color": _INK, "axes.labelcolor": _QUIET, "xtick.color": _QUIET,
        "ytick.color": _QUIET, "axes.edgecolor": _GRID, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
        "grid.color": _GRID, "axes.axisbelow": True, "legend.frameon": False,
    }  # fmt: skip
    with matplotlib.rc_context(style):
        rows = len(results) if experiment.figure is None else 8
        figure = Figure(
            figsize=(6.4, max(2.2, 1.0 + 0.3 * rows)),
            dpi=100,
            facecolor="white",
            layout="constrained",
        )
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        (experiment.figure or bars(experiment.columns[0]))(axes, results)
        axes.set_title(experiment.system, loc="left", fontsize=11, color=_INK)
        with replacing(path, durable=False) as aside:
            figure.savefig(aside, format="png")


def bars(name: str) -> Any:
    """A picture with a bar per arm for the mean of a figure, and a dot per seed."""

    def drawn(axes: Any, results: Results) -> None:
        for place, arm in enumerate(results):
            axes.barh(place, average(results, arm, name), color=COLORS[0], alpha=0.35, height=0.6)
            found = values(results, arm, name)
            axes.plot(found, [place] * len(found), "o", color=COLORS[0], markersize=4)
        axes.set_yticks(range(len(results)), list(results))
        axes.invert_yaxis()
        axes.set_xlabel(name.replace("_", " "))

    return drawn


def lines(name: str, series: dict[str, dict[float, str]], xlabel: str) -> Any:
    """A picture with a line per series, {label: {x: arm}}: means of a figure, the range over seeds behind them. The x are evenly
    spaced."""

    def drawn(axes: Any, results: Results) -> None:
        ticks = sorted({x for arms in series.values() for x in arms})
        for color, marker, (label, arms) in zip(COLORS, MARKERS, series.items(), strict=False):
            known = [
                (ticks.index(x), values(results, arm, name))
                for x, arm in arms.items()
                if arm in results
            ]
            places = [place for place, _ in known]
            axes.fill_between(
                places,
                [min(v) for _, v in known],
                [max(v) for _, v in known],
                color=color,
                alpha=0.15,
            )
            axes.plot(
                places,
                [statistics.fmean(v) for _, v in known],
                marker=marker,
                color=color,
                label=label,
            )
        axes.set_xticks(range(len(ticks)), [f"{x:g}" for x in ticks])
        axes.set_xlabel(xlabel)
        axes.set_ylabel(name.replace("_", " "))
        axes.legend()

    return drawn
