"""SAPO once more: eight nodes, judged in the family that each of them hardly knows."""

from __future__ import annotations

import functools
from dataclasses import replace

from experiments import sapo_swarm
from experiments.base import Results, Verdict, all_of, average, beats, keeps
from experiments.curves import curves

NODES, ROUNDS = 8, 30
ARMS = ("8/0", "4/4", "2/6")
AT_MOST = 0.1


def judge(results: Results) -> Verdict:
    start = max(average(results, arm, "weak_start") for arm in ARMS)
    return all_of(
        (start <= AT_MOST, f"at first {start:.2f} in the weak family"),
        beats(results, "4/4", "8/0", "weak", by=0.0),
        keeps(results, "4/4", "2/6", "weak", share=1.0),
    )


EXPERIMENT = replace(
    sapo_swarm.EXPERIMENT,
    name="sapo_weak",
    setup=f"As above with {NODES} nodes, two for each family that they begin without, and {ROUNDS} rounds; the figure is the "
    "mean reward in that family.",
    rule=f"The start is at most {AT_MOST} in the weak family in the mean; there 4/4 is above 8/0 in every seed, and 2/6 not "
    "above 4/4 in the mean.",
    arms=ARMS,
    columns=("weak", "weak_start", "cumulative"),
    run=functools.partial(sapo_swarm.run, count=NODES, rounds_in_all=ROUNDS),
    judge=judge,
    figure=curves("weak_curve", "round", "reward in the weak family"),
)
