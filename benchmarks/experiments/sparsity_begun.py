"""Sparsity once more: at the paper's learning rate, with and without tensors that begin at 0, early and later."""

from __future__ import annotations

from dataclasses import replace

from experiments import sparsity
from experiments.base import Figures, Results, Verdict, all_of, average, values

LEAST = 0.984
LATER = 300
ARMS = ("lr 5e-06", f"lr 5e-06, after {LATER} versions")


def run(name: str, seed: int, quick: bool) -> Figures:
    return sparsity.run(name.replace(",", ""), seed, quick, before=LATER if "after" in name else 0)


def judge(results: Results) -> Verdict:
    early, later = (values(results, arm, "unchanged_begun") for arm in ARMS)
    whole = average(results, ARMS[0], "unchanged")
    return all_of(
        (
            min(early) >= LEAST,
            f"at least {min(early):.4f} is unchanged of what does not begin at 0, {whole:.4f} of all",
        ),
        (True, f"after {LATER} versions {min(later):.4f}"),
    )


EXPERIMENT = replace(
    sparsity.EXPERIMENT,
    name="sparsity_begun",
    setup=f"As above at the paper's rate, 5e-6, counted without the tensors that begin at 0; and after {LATER} versions.",
    rule=f"Of the weights of tensors that do not begin at 0, at least {LEAST} are unchanged in every seed.",
    arms=ARMS,
    columns=("unchanged_begun", "unchanged", "least", "bytes_ratio", "std"),
    run=run,
    judge=judge,
)
