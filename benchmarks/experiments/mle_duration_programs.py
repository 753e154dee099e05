"""Duration-aware gradients once more: real programs in a sandbox, with the paper's baseline and without one."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from experiments import mle_duration
from experiments.base import Figures, Results, Verdict, all_of, average, values
from experiments.mle_duration import UNWEIGHTED, WEIGHTED

ACTORS = 4
SECONDS_IN_ALL, WINDOW_S = 60.0, 1.0
BARE = "\n".join((
    "algorithm.advantage={name: reinforce, baseline: none}",
    "algorithm.losses=[{name: ppo_clip, anchor: rollout}]",
    "algorithm.critic=null",
))  # fmt: skip
PARTS = {
    "unweighted, no baseline": (f"{UNWEIGHTED}\n{BARE}", False),
    "by duration, no baseline": (f"{WEIGHTED}\n{BARE}", False),
    "unweighted, critic": (UNWEIGHTED, False),
    "by duration, critic": (WEIGHTED, False),
}


def tables(seed: int) -> tuple[Any, dict[str, Any]]:
    """(task, environment section)."""
    from experiments.tasks.table_programs import CHOICE, TablePrograms

    return TablePrograms(seed), {"name": CHOICE, "seed": seed}


def run(arm: str, seed: int, quick: bool) -> Figures:
    played = functools.partial(mle_duration.run, parts=PARTS, make=tables, actors=ACTORS)
    return played(arm, seed, quick, seconds_in_all=4.0 if quick else SECONDS_IN_ALL, window_s=WINDOW_S)


def judge(results: Results) -> Verdict:
    off, on, *critic = PARTS
    unweighted, weighted = values(results, off, "slow"), values(results, on, "slow")
    told = ", ".join(f"{average(results, arm, 'slow'):.2f} ({arm})" for arm in critic)
    return all_of(
        (max(unweighted) < 0.5, f"without a baseline the slow program's share is at most {max(unweighted):.2f} unweighted"),
        (min(weighted) > 0.8, f"at least {min(weighted):.2f} by duration"),
        (True, f"with a critic {told}"),
    )


EXPERIMENT = replace(
    mle_duration.EXPERIMENT,
    name="mle_duration_programs",
    setup=(
        "The world `ml_engineering`: a table whose target is a wave of one feature and a line in another. A program in plain "
        "Python that knows the line, and one in numpy that chooses its nearest neighbours by cross-validation, in sandboxes, "
        f"scored by targets that they never see. {ACTORS} actors on two cores, {SECONDS_IN_ALL:.0f} s in all arms. Without a "
        "baseline the return itself weighs a sample, as where a critic has not learned yet: what the paper's argument is about."
    ),
    rule="Without a baseline the slow program's share ends below 0.5 unweighted and above 0.8 by duration, in every seed.",
    arms=tuple(PARTS),
    run=run,
    judge=judge,
)
