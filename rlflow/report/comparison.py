"""Runs compared: curves, configurations, questions won and lost, time and tokens to a score.

`sections` says it once; the terminal and the page show the same rows."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlflow.errors import ConfigError
from rlflow.report.charts import NARROW, comparison_svg
from rlflow.report.findings import Fault, findings
from rlflow.report.lines import clock, interval_text, sparkline
from rlflow.report.metrics import Metrics, label, scores
from rlflow.report.page import filled, markup, picture, table, template
from rlflow.report.recorded import RunFiles, grouped
from rlflow.report.records import question_of
from rlflow.storage.files import leaves, write_text

UNCOMPARED = ("run.name", "run.directory", "run.resume", "run.overwrite", "metrics.progress")
"""Keys that differ between any two runs, or say nothing about what they did."""
WIDTH, LABEL_WIDTH = 80, 34  # columns of the terminal
EXAMPLES = 3  # of questions won, and of those lost
Section = tuple[str, list[list[str]]]
"""A title, and rows whose first cell says what the others are about."""


@dataclass(frozen=True)
class Measurement:
    """A value at a step, after seconds of steps and trained tokens. low, high: 95% interval."""

    step: int
    seconds: float
    tokens: float
    value: float
    low: float | None = None
    high: float | None = None

    @property
    def text(self) -> str:
        """The value with its interval, where there is one."""
        return f"{self.value:.3f}{interval_text(self.low, self.high)}"


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
        split = f"{won} won, {lost} lost, {self.shared - won - lost} alike of {self.shared}"
        return f"{split}: {sure} (p = {self.p:.2g}, exact sign test)"


@dataclass(frozen=True)
class Comparison:
    """What is known of several runs; the others are held against the first one.

    reached: when an evaluation of each first showed the score `target`."""

    names: list[str]
    score: str
    evaluated: Curves
    trained: Curves
    configuration: list[list[str]]
    duels: list[Duel]
    faults: dict[str, list[Fault]]
    target: float | None
    reached: dict[str, Measurement | None] = field(default_factory=dict)


def compare(runs: Sequence[RunFiles], target: float | None = None) -> Comparison:
    """The runs by the first score that they have in common, else by the reward.

    target: the score whose time is asked for; None: `common_height`. Raises ConfigError for fewer
    than two runs."""
    if len(runs) < 2:
        raise ConfigError(f"compare: expected two runs or more, found {len(runs)}.")
    named = dict(zip(distinct_names(runs), runs, strict=True))
    base, *others = named
    score = common_score([run.registered for run in runs])
    evaluated = {name: curve(run.metrics, f"eval/{score}") for name, run in named.items()}
    asked = common_height(list(evaluated.values())) if target is None else target
    reached = {}
    if asked is not None:
        reached = {name: first_at(points, asked) for name, points in evaluated.items()}
    return Comparison(
        names=list(named),
        score=score,
        evaluated=evaluated,
        trained={name: curve(run.metrics, f"train/{score}") for name, run in named.items()},
        configuration=differing_keys([run.config for run in runs]),
        duels=[duel(named[base], named[other], base, other) for other in others],
        faults={name: findings(run) for name, run in named.items()},
        target=asked,
        reached=reached,
    )


def distinct_names(runs: Sequence[RunFiles]) -> list[str]:
    """The runs' names; where two are called alike, their paths."""
    paths = [str(run.path) for run in runs]
    numbered = [f"{path} ({place})" for place, path in enumerate(paths, start=1)]
    choices = ([run.name for run in runs], paths, numbered)
    return next(names for names in choices if len(set(names)) == len(names))


def common_score(registered: Sequence[Metrics]) -> str:
    """The first score of the first run that all have, else reward."""
    shared = set.intersection(*(set(scores(one)) for one in registered))
    return next((name for name in scores(registered[0]) if name in shared), "reward")


def curve(metrics: Sequence[Mapping[str, float]], name: str) -> list[Measurement]:
    """The metric over the run. Seconds are those of finished steps, evaluations left out."""
    points, seconds, tokens = [], 0.0, 0.0
    for record in metrics:
        seconds += record.get("time/step_s", 0.0)
        tokens += record.get("train/tokens", 0.0)
        if name in record:
            ends = record.get(f"{name}_low"), record.get(f"{name}_high")
            points.append(Measurement(int(record["step"]), seconds, tokens, record[name], *ends))
    return points


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
    keys = dict.fromkeys(key for values in flat for key in values if key not in UNCOMPARED)
    rows = [[key, *(_value(values.get(key, "-")) for values in flat)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def _value(value: Any) -> str:
    return "null" if value is None else str(value)


def duel(base: RunFiles, other: RunFiles, base_name: str, other_name: str) -> Duel:
    """The last evaluations of two runs, question by question; attempts at one count as one."""
    asked, answers = _shares(base), _shares(other)
    shared = [task for task in asked if task in answers]
    won = [asked[task][1] for task in shared if answers[task][0] > asked[task][0]]
    lost = [asked[task][1] for task in shared if answers[task][0] < asked[task][0]]
    differing = sum(asked[task][1] != answers[task][1] for task in shared)
    p = sign_test(len(won), len(lost))
    return Duel(base_name, other_name, len(shared), won, lost, p, differing)


def sign_test(won: int, lost: int) -> float:
    """The exact two-sided p-value of a split as uneven or more, were both sides equally likely.

    Twice the smaller tail of the binomial distribution, at most 1 (McNemar 1947 in its exact form;
    Conover 1999, sec. 3.4)."""
    count = won + lost
    tail = sum(math.comb(count, k) for k in range(min(won, lost) + 1))
    return min(1.0, 2 * tail / 2**count)


def _shares(run: RunFiles) -> dict[str, tuple[float, str]]:
    """{task: (share of its usable attempts that solved it, its question)}, last evaluation."""
    groups = grouped(run.records("eval", max(run.evaluations))) if run.evaluations else []
    shares = {str(group[0]["task_id"]): (run.solved_share(group), group[0]) for group in groups}
    return {
        task: (share, question_of(record))
        for task, (share, record) in shares.items()
        if share is not None
    }


# ---------------------------------------------------------------- for people


def sections(comparison: Comparison) -> list[Section]:
    """The comparison as titles and rows."""
    score = label(comparison.score)
    found: list[Section] = []
    rows = [[name, _rise(comparison.evaluated[name], 12)] for name in comparison.names]
    found.append((f"{score}, evaluated: first -> last [95% interval]", rows))
    if any(len(points) > 1 for points in comparison.trained.values()):
        rows = [[name, _rise(points, 24)] for name, points in comparison.trained.items() if points]
        found.append((f"{score}, in training: first -> last step", rows))
    if comparison.reached:
        title = f"to {score} {comparison.target:.3f}: steps, time in steps, trained tokens"
        found.append((title, [[name, _when(at)] for name, at in comparison.reached.items()]))
    for one in comparison.duels:
        rows = [["", one.verdict]]
        if one.differing:
            rows.append(["!", f"{one.differing} of them have the same id and another text"])
        rows += [["won", " ".join(question.split())] for question in one.won[:EXAMPLES]]
        rows += [["lost", " ".join(question.split())] for question in one.lost[:EXAMPLES]]
        found.append((f"questions of the last evaluation, {one.other} against {one.base}", rows))
    if comparison.configuration:
        title = f"configuration keys that differ: {', '.join(comparison.names)}"
        found.append((title, comparison.configuration))
    else:
        found.append(("the configurations are the same", []))
    return found


def _rise(points: Sequence[Measurement], width: int) -> str:
    if not points:
        return "no evaluation in metrics.jsonl"
    spark = sparkline([point.value for point in points], width) if len(points) > 2 else "→"
    last = points[-1]
    return f"{points[0].value:.3f} {spark} {last.text} at {last.step}, {clock(last.seconds)}"


def _when(point: Measurement | None) -> str:
    if point is None:
        return "not reached"
    tokens, unit = point.tokens, ""
    for larger in ("k", "M"):
        if tokens >= 1e3:
            tokens, unit = tokens / 1e3, larger
    count = f"{tokens:.1f}M" if unit == "M" else f"{tokens:.0f}{unit}"
    return f"step {point.step}, {clock(point.seconds)}, {count} tokens"


def comparison_text(comparison: Comparison) -> str:
    """The comparison in lines of at most 80 characters."""
    lines = []
    for name, found in comparison.faults.items():
        for one in found:
            told = f"! {name}: {one.title}. {one.text}"
            lines += textwrap.wrap(told, WIDTH, subsequent_indent="  ")
    for title, rows in sections(comparison):
        lines += ["", *textwrap.wrap(title, WIDTH, subsequent_indent="  ")]
        wide = min(LABEL_WIDTH, max((len(row[0]) for row in rows), default=0))
        for row in rows:
            lines += _lines(row, wide)
    return "\n".join(lines).lstrip("\n")


def _lines(row: Sequence[str], wide: int) -> list[str]:
    """A row in one line, or in as many as it has cells where it is too long."""
    named = f"  {row[0]:<{wide}}  " if wide else "  "
    line = named + "  |  ".join(row[1:])
    if len(line) <= WIDTH:
        return [line]
    if len(row) > 2 or len(row[0]) > wide:
        return [_cut(f"  {row[0]}"), *(_cut(f"      {cell}") for cell in row[1:])]
    return textwrap.wrap(line, WIDTH, subsequent_indent=" " * len(named))


def _cut(text: str) -> str:
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…"


def write_comparison(comparison: Comparison, out: str | Path) -> None:
    """Writes the comparison as one HTML file, without a script."""
    parts = [f"<h1>{markup(' against '.join(reversed(comparison.names)))}</h1>"]
    for name, found in comparison.faults.items():
        told = [f"<b>{markup(f'{name}: {one.title}')}</b> {markup(one.text)}" for one in found]
        parts += [f'<p class="fault">{text}</p>' for text in told]
    for what, curves in (("evaluated", comparison.evaluated), ("in training", comparison.trained)):
        if any(curves.values()):
            drawn = comparison_svg(curves), comparison_svg(curves, NARROW)
            title = f"{label(comparison.score)}, {what}"
            parts.append(f"<h2>{markup(title)}</h2>{picture(*drawn, title)}")
    for title, rows in sections(comparison):
        parts.append(f"<h2>{markup(title)}</h2>{table([], rows) if rows else ''}")
    names = markup(" | ".join(comparison.names))
    page = filled(template("compare.html"), {"TITLE": names, "BODY": "\n".join(parts)})
    write_text(out, page, durable=False)
