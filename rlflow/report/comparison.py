"""Runs held against each other: curves, configurations, questions won and lost, time and tokens to a score."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.errors import ConfigError
from rlflow.report.findings import findings
from rlflow.report.metrics import Metrics, scores
from rlflow.report.recorded import RunFiles, grouped
from rlflow.report.records import question_of
from rlflow.report.warnings import Fault
from rlflow.storage.files import leaves

UNCOMPARED = ("run.name", "run.directory", "run.resume", "run.overwrite", "metrics.progress")
"""Keys that differ between any two runs, or say nothing about what they did."""


@dataclass(frozen=True)
class Measurement:
    """A measurement: at a step, after so many seconds of steps and so many trained tokens. low, high: its 95% interval."""

    step: int
    seconds: float
    tokens: float
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Reached:
    """When an evaluation first showed a score; None: none did."""

    run: str
    point: Measurement | None


@dataclass(frozen=True)
class Duel:
    """Two runs' last evaluations over the questions that both were asked: how many `other` does better at than `base`, how many
    worse, and the exact two-sided p-value of that split if neither were better (sign test; McNemar's exact test for answers that
    are right or wrong). examples: questions won and lost, a few of each."""

    base: str
    other: str
    shared: int
    won: int
    lost: int
    p: float
    base_score: float
    other_score: float
    won_examples: Sequence[str] = ()
    lost_examples: Sequence[str] = ()
    differing: int = 0  # of the shared questions that are not the same text in both

    @property
    def verdict(self) -> str:
        """The split in words."""
        if not self.shared:
            return f"{self.other} and {self.base} were asked no question in common"
        tied = self.shared - self.won - self.lost
        better = self.other if self.won > self.lost else self.base
        sure = f"{better} is better" if self.p < 0.05 else "no difference is shown"
        return f"{self.won} won, {self.lost} lost, {tied} alike of {self.shared}: {sure} (p = {self.p:.2g}, exact sign test)"


@dataclass(frozen=True)
class Comparison:
    """What is known of several runs, the first being the one that the others are held against."""

    names: list[str]
    score: str
    evaluated: dict[str, list[Measurement]]
    trained: dict[str, list[Measurement]]
    configuration: list[tuple[str, list[str]]]
    duels: list[Duel]
    target: float | None
    reached: list[Reached]
    faults: dict[str, list[Fault]]


def compare(runs: Sequence[RunFiles], target: float | None = None) -> Comparison:
    """The runs' comparison by the first score that they have in common, else by the reward. target: the score whose time is asked
    for; None: `common_height`.

    Raises ConfigError for fewer than two runs."""
    if len(runs) < 2:
        raise ConfigError(f"compare: expected two runs or more, found {len(runs)}.")
    names = distinct_names(runs)
    score = common_score([run.registered for run in runs])
    evaluated = {name: curve(run.metrics, f"eval/{score}") for name, run in zip(names, runs, strict=True)}
    trained = {name: curve(run.metrics, f"train/{score}") for name, run in zip(names, runs, strict=True)}
    asked = common_height(list(evaluated.values())) if target is None else target
    return Comparison(
        names=names,
        score=score,
        evaluated=evaluated,
        trained=trained,
        configuration=differing_keys([run.config for run in runs]),
        duels=[duel(runs[0], other, names[0], name) for other, name in zip(runs[1:], names[1:], strict=True)],
        target=asked,
        reached=[Reached(name, first_at(points, asked)) for name, points in evaluated.items()]
        if asked is not None
        else [],
        faults={name: findings(run) for name, run in zip(names, runs, strict=True)},
    )


def distinct_names(runs: Sequence[RunFiles]) -> list[str]:
    """The runs' names; where two are called alike, their paths."""
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return names
    paths = [str(run.path) for run in runs]
    return (
        paths if len(set(paths)) == len(paths) else [f"{path} ({place})" for place, path in enumerate(paths, start=1)]
    )


def common_score(registered: Sequence[Metrics]) -> str:
    """The first score of the first run that all have, else reward."""
    return next(
        (name for name in scores(registered[0]) if all(name in scores(other) for other in registered)), "reward"
    )


def curve(metrics: Sequence[Mapping[str, float]], name: str) -> list[Measurement]:
    """The metric over the run. Seconds are those of finished steps (`time/step_s`), evaluations left out, also after a resume."""
    points, seconds, tokens = [], 0.0, 0.0
    for record in metrics:
        seconds += record.get("time/step_s", 0.0)
        tokens += record.get("train/tokens", 0.0)
        if name in record:
            ends = record.get(f"{name}_low"), record.get(f"{name}_high")
            points.append(Measurement(int(record["step"]), seconds, tokens, record[name], *ends))
    return points


def common_height(curves: Sequence[Sequence[Measurement]]) -> float | None:
    """The highest value that every curve reached; None where one has no point, or all of them began there."""
    if not all(curves):
        return None
    height = min(max(point.value for point in points) for points in curves)
    return height if any(points[0].value < height for points in curves) else None


def first_at(points: Sequence[Measurement], target: float) -> Measurement | None:
    """The first point that reaches the target."""
    return next((point for point in points if point.value >= target), None)


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """(dotted key, its value in each configuration) where these differ, in the order of the files; `-` where one lacks it."""
    flat = [dict(leaves(config)) for config in configs]
    keys = dict.fromkeys(key for values in flat for key in values)
    rows = [(key, [_shown(values, key) for values in flat]) for key in keys if key not in UNCOMPARED]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def duel(base: RunFiles, other: RunFiles, base_name: str, other_name: str) -> Duel:
    """The last evaluations of two runs, question by question. Attempts at one question are one: their share of solved ones."""
    asked, answers = _shares(base), _shares(other)
    shared = [task for task in asked if task in answers]
    won = [task for task in shared if answers[task][0] > asked[task][0]]
    lost = [task for task in shared if answers[task][0] < asked[task][0]]

    def mean(shares: Mapping[str, tuple[float, str]]) -> float:
        return sum(shares[task][0] for task in shared) / len(shared) if shared else math.nan

    return Duel(
        base=base_name,
        other=other_name,
        shared=len(shared),
        won=len(won),
        lost=len(lost),
        p=sign_test(len(won), len(lost)),
        base_score=mean(asked),
        other_score=mean(answers),
        won_examples=[asked[task][1] for task in won[:3]],
        lost_examples=[asked[task][1] for task in lost[:3]],
        differing=sum(asked[task][1] != answers[task][1] for task in shared),
    )


def sign_test(won: int, lost: int) -> float:
    """The exact two-sided p-value of a split that is as uneven or more, were both sides equally likely: twice the smaller tail of
    the binomial distribution, at most 1 (McNemar 1947 in its exact form; Conover 1999, sec. 3.4)."""
    count = won + lost
    tail = sum(math.comb(count, k) for k in range(min(won, lost) + 1))
    return min(1.0, 2 * tail / 2**count)


def _shares(run: RunFiles) -> dict[str, tuple[float, str]]:
    """{task: (share of its usable attempts that solved it, its question)} of the last evaluation."""
    if not run.evaluations:
        return {}
    found = {}
    for group in grouped(run.records("eval", max(run.evaluations))):
        share = run.solved_share(group)
        if share is not None:
            found[str(group[0]["task_id"])] = share, question_of(group[0])
    return found


def _shown(values: Mapping[str, Any], key: str) -> str:
    return "-" if key not in values else "null" if values[key] is None else str(values[key])
