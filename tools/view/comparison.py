"""Runs compared: curves, configurations, questions won and lost, time and tokens to a score.

`sections` says it once; the terminal and the page show the same rows."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.errors import ConfigError
from rlflow.report.alarms import Fault
from rlflow.report.lines import clock
from rlflow.report.metrics import Metrics, label, scores
from rlflow.storage.files import leaves, write_text
from rlflow.texts import printable

from .charts import comparison_svg
from .curves import Measurement, curve, sparkline
from .episodes import question_of
from .findings import findings
from .page import filled, markup, picture, table, template
from .recorded import RunFiles, grouped

UNCOMPARED = (
    "run.name",
    "run.directory",
    "run.resume",
    "run.overwrite",
    "metrics.progress",
)
"""Keys that differ between any two runs, or say nothing about what they did."""
WIDTH, LABEL_WIDTH = 80, 34  # columns of the terminal
EXAMPLES = 3  # of questions won, and of those lost
Section = tuple[str, list[list[str]]]
"""A title, and rows whose first cell says what the others are about."""
Curves = dict[str, list[Measurement]]


@dataclass(frozen=True)
class Duel:
    """Two runs' last evaluations over the questions that both were asked.

    p: exact two-sided p-value of that split if neither were better (sign test; McNemar's exact test
    for answers that are right or wrong). differing: shared questions whose texts differ."""

    base: str
    other: str
    shared: int
    won: list[str]  # questions that `other` does better at than `base`
    lost: list[str]
    p: float
    differing: int = 0

    @property
    def verdict(self) -> str:
        """The split in words."""
        if not self.shared:
            return f"{self.other} and {self.base} were asked no question in common"
        won, lost = len(self.won), len(self.lost)
        better = self.other if won > lost else self.base
        sure = f"{better} is better" if self.p < 0.05 else "no difference is shown"
        alike = self.shared - won - lost
        split = f"{won} won, {lost} lost, {alike} alike of {self.shared}"
        return f"{split}: {sure} (p = {self.p:.2g}, exact sign test)"


@dataclass(frozen=True)
class Comparison:
    """What is known of several runs; the others are held against the first one.

    target: the score whose time is asked for, if any."""

    score: str
    evaluated: Curves
    trained: Curves
    configuration: list[list[str]]
    duels: list[Duel]
    faults: list[tuple[str, Fault]]
    target: float | None

    @property
    def names(self) -> list[str]:
        """What the runs are called here."""
        return list(self.evaluated)


def compare(runs: Sequence[RunFiles], target: float | None = None) -> Comparison:
    """The runs by the first score that they have in common, else by the reward.

    target: the score whose time is asked for; None: `common_height`. Raises ConfigError for fewer
    than two runs."""
    if len(runs) < 2:
        raise ConfigError(f"compare: expected two runs or more, found {len(runs)}.")
    named = dict(zip(distinct_names(runs), runs, strict=True))
    base, *others = named
    score = common_score([run.registered for run in runs])
    evaluated, trained = (
        {name: curve(run.metrics, f"{section}/{score}") for name, run in named.items()}
        for section in ("eval", "train")
    )
    return Comparison(
        score,
        evaluated,
        trained,
        configuration=differing_keys([run.config for run in runs]),
        duels=[duel(named[base], named[other], base, other) for other in others],
        faults=[(name, one) for name, run in named.items() for one in findings(run)],
        target=common_height(list(evaluated.values())) if target is None else target,
    )


def distinct_names(runs: Sequence[RunFiles]) -> list[str]:
    """The runs' names; where two are called alike, their paths."""
    paths = [str(run.path) for run in runs]
    numbered = [f"{path} ({place})" for place, path in enumerate(paths, start=1)]
    choices = ([run.name for run in runs], paths, numbered)
    return next(names for names in choices if len(set(names)) == len(names))


def common_score(registered: Sequence[Metrics]) -> str:
    """The first score of the first run that all have, else reward."""
    first, *others = map(scores, registered)
    shared = (name for name in first if all(name in names for names in others))
    return next(shared, "reward")


def common_height(curves: Sequence[Sequence[Measurement]]) -> float | None:
    """The highest value that every curve reached; None if one has no point, or all began there."""
    if not all(curves):
        return None
    height = min(max(point.value for point in points) for points in curves)
    return height if any(points[0].value < height for points in curves) else None


def first_at(points: Sequence[Measurement], target: float) -> Measurement | None:
    """The first point that reaches the target."""
    return next((point for point in points if point.value >= target), None)


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """[dotted key, its value in each configuration] where these differ; `-` where one lacks it."""
    flat = [dict(leaves(config)) for config in configs]
    rows = []
    for key in dict.fromkeys(key for values in flat for key in values):
        found = [values.get(key, "-") for values in flat]
        shown = ["null" if value is None else str(value) for value in found]
        if key not in UNCOMPARED and len(set(shown)) > 1:
            rows.append([key, *shown])
    return rows


def duel(base: RunFiles, other: RunFiles, base_name: str, other_name: str) -> Duel:
    """The last evaluations of two runs, question by question; attempts at one count as one."""
    asked, answers = _shares(base), _shares(other)
    pairs = [(*asked[task], *answers[task]) for task in asked if task in answers]
    won = [question for before, question, after, _ in pairs if after > before]
    lost = [question for before, question, after, _ in pairs if after < before]
    differing = sum(question != other_text for _, question, _, other_text in pairs)
    p = sign_test(len(won), len(lost))
    return Duel(base_name, other_name, len(pairs), won, lost, p, differing)


def sign_test(won: int, lost: int) -> float:
    """The exact two-sided p-value of a split as uneven or more, were both sides equally likely.

    Twice the smaller tail of the binomial distribution, at most 1 (McNemar 1947 in its exact form;
    Conover 1999, sec. 3.4)."""
    count = won + lost
    tail = sum(math.comb(count, k) for k in range(min(won, lost) + 1))
    return min(1.0, 2 * tail / 2**count)


def _shares(run: RunFiles) -> dict[str, tuple[float, str]]:
    """{task: (share of its usable attempts that solved it, its question)}, last evaluation."""
    last = run.records("eval", max(run.evaluations)) if run.evaluations else []
    found = {}
    for group in grouped(last):
        share = run.solved_share(group)
        if share is not None:
            found[str(group[0]["task_id"])] = share, question_of(group[0])
    return found


# ---------------------------------------------------------------- for people


def sections(comparison: Comparison) -> list[Section]:
    """The comparison as titles and rows."""
    score, target = label(comparison.score), comparison.target
    rows = [[name, _rise(points, 12)] for name, points in comparison.evaluated.items()]
    found = [(f"{score}, evaluated: first -> last [95% interval]", rows)]
    if any(len(points) > 1 for points in comparison.trained.values()):
        trained = {name: points for name, points in comparison.trained.items() if points}
        rows = [[name, _rise(points, 24)] for name, points in trained.items()]
        found.append((f"{score}, in training: first -> last step", rows))
    if target is not None:
        title = f"to {score} {target:.3f}: steps, time in steps, trained tokens"
        rows = [[name, _when(points, target)] for name, points in comparison.evaluated.items()]
        found.append((title, rows))
    found += [_duel_section(one) for one in comparison.duels]
    title = f"configuration keys that differ: {', '.join(comparison.names)}"
    if not comparison.configuration:
        title = "the configurations are the same"
    return [*found, (title, comparison.configuration)]


def _duel_section(one: Duel) -> Section:
    rows = [["", one.verdict]]
    if one.differing:
        told = f"{one.differing} of them have the same id and another text"
        rows.append(["!", told])
    for name, questions in (("won", one.won), ("lost", one.lost)):
        rows += [[name, " ".join(text.split())] for text in questions[:EXAMPLES]]
    return f"questions of the last evaluation, {one.other} against {one.base}", rows


def _rise(points: Sequence[Measurement], width: int) -> str:
    if not points:
        return "no evaluation in metrics.jsonl"
    values, last = [point.value for point in points], points[-1]
    spark = sparkline(values, width) if len(points) > 2 else "→"
    return f"{values[0]:.3f} {spark} {last.text} at {last.step}, {clock(last.seconds)}"


def _when(points: Sequence[Measurement], target: float) -> str:
    point = first_at(points, target)
    if point is None:
        return "not reached"
    return f"step {point.step}, {clock(point.seconds)}, {point.tokens:,.0f} tokens"


def comparison_text(comparison: Comparison) -> str:
    """The comparison in lines of at most 80 characters."""
    lines = []
    for name, one in comparison.faults:
        lines += _wrapped(f"! {name}: {one.title}. {one.text}", 2)
    for title, rows in sections(comparison):
        lines += ["", *_wrapped(title, 2)]
        wide = min(LABEL_WIDTH, max((len(row[0]) for row in rows), default=0))
        for name, *cells in rows:
            line = f"  {name:<{wide}}  {'  |  '.join(cells)}"
            lines += _wrapped(line, wide + 4)
    return printable("\n".join(lines).lstrip("\n"))


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=" " * indent)


def write_comparison(comparison: Comparison, out: str | Path) -> None:
    """Writes the comparison as one HTML file, without a script."""
    parts = [f"<h1>{markup(' against '.join(reversed(comparison.names)))}</h1>"]
    for name, one in comparison.faults:
        told = f"<b>{markup(f'{name}: {one.title}')}</b> {markup(one.text)}"
        parts.append(f'<p class="fault">{told}</p>')
    drawn = {"evaluated": comparison.evaluated, "in training": comparison.trained}
    for what, curves in drawn.items():
        if any(curves.values()):
            title = f"{label(comparison.score)}, {what}"
            wide, narrow = (comparison_svg(curves, narrow=narrow) for narrow in (False, True))
            image = picture(wide, narrow, title)
            parts.append(f"<h2>{markup(title)}</h2>{image}")
    for title, rows in sections(comparison):
        parts.append(f"<h2>{markup(title)}</h2>{table([], rows) if rows else ''}")
    values = {
        "TITLE": markup(" | ".join(comparison.names)),
        "PALETTE": template("palette.css"),
        "BODY": "\n".join(parts),
    }
    write_text(out, filled(template("compare.html"), values), durable=False)
