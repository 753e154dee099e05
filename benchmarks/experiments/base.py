"""What an experiment is: a claim of a system, arms that are compared over seeds, and a rule that was fixed before any run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Figures = dict[str, Any]
"""What a cell gives: numbers by name. A list of numbers is a curve, for the picture alone."""
Results = Mapping[str, list[Figures]]
"""Of every arm: the figures of its seeds, in order."""
Verdict = tuple[bool, str]
"""(whether the claim reproduces, the numbers behind that in one sentence)."""

TRAINING = (
    "rlflow.loop",
    "tests.reference.trainer",
    "rlflow.rollout.embedded.embedded_engine",
    "transformers.models.qwen2.modeling_qwen2",
    "tokenizers",
)


@dataclass(frozen=True)
class Experiment:
    """A claim and how it is put to the test.

    run: (arm, seed, quick) -> figures, in a process of its own; quick: the shortest run that goes through all parts, a second or
    two. It imports what is heavy itself, so that `--list` is fast. judge: the rule, on figures of all arms and seeds. figure:
    (matplotlib axes, results) -> None; None: a bar per arm of the first column. imports: modules that are loaded once, before the
    cells are forked. version: raise it where `run` or an arm changes its meaning; cells of other versions are made again.
    """

    name: str  # of the file, of the picture, and of `--only`
    system: str  # whose claim it is, with its source
    claim: str  # what they say, with their numbers
    setup: str  # what is done here, in two lines, and what differs
    rule: str  # when it counts as reproduced, in words
    arms: tuple[str, ...]
    columns: tuple[str, ...]  # the figures of the table
    run: Callable[[str, int, bool], Figures]
    judge: Callable[[Results], Verdict]
    figure: Callable[[Any, Results], None] | None = None
    imports: tuple[str, ...] = TRAINING
    quick_arms: tuple[str, ...] = ()  # of a quick run; (): the first and the last
    version: int = 1
    deadline_s: float = 240.0  # of a cell

    def arms_of(self, quick: bool) -> tuple[str, ...]:
        """The arms of a run."""
        if not quick:
            return self.arms
        return self.quick_arms or tuple(dict.fromkeys((self.arms[0], self.arms[-1])))


def values(results: Results, arm: str, name: str) -> list[float]:
    """A figure of every seed of an arm; NaN where it could not be measured."""
    found = [figures.get(name) for figures in results[arm]]
    return [float("nan") if value is None else float(value) for value in found]


def average(results: Results, arm: str, name: str) -> float:
    """The mean of a figure over the seeds of an arm."""
    return statistics.fmean(values(results, arm, name))


def keeps(
    results: Results, arm: str, of: str, name: str = "success", share: float = 0.9
) -> Verdict:
    """Whether an arm has at least that share of what another has, in the mean over seeds."""
    kept, whole = average(results, arm, name), average(results, of, name)
    return kept >= share * whole, f"'{arm}' has {kept:.3g} where '{of}' has {whole:.3g}"


def beats(
    results: Results, better: str, worse: str, name: str = "success", by: float = 0.05
) -> Verdict:
    """Whether an arm has more than another in every seed, and by at least `by` in the mean."""
    pairs = list(zip(values(results, better, name), values(results, worse, name), strict=True))
    above = sum(one > other for one, other in pairs)
    gap = average(results, better, name) - average(results, worse, name)
    told = f"'{better}' has {average(results, better, name):.3g} and '{worse}' {average(results, worse, name):.3g}"
    return gap >= by and above == len(pairs), f"{told} (more in {above} of {len(pairs)} seeds)"


def all_of(*verdicts: Verdict) -> Verdict:
    """Whether every part of a rule holds, and the numbers of each; those that do not are marked."""
    return all(holds for holds, _ in verdicts), "; ".join(
        told if holds else f"NOT {told}" for holds, told in verdicts
    )
