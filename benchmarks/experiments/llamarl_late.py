"""AIPO once more, on samples twice as late, where the correction has more to correct."""

from __future__ import annotations

from dataclasses import replace

from experiments import llamarl
from experiments.base import Results, Verdict, all_of, beats, keeps
from experiments.llamarl import arm
from experiments.reports import lines

LAGS, KINDS = (1, 8, 16), ("cap 2", "no correction")


def judge(results: Results) -> Verdict:
    return all_of(
        keeps(results, arm(8, "cap 2"), arm(1, "cap 2")),
        beats(results, arm(16, "cap 2"), arm(16, "no correction")),
    )


EXPERIMENT = replace(
    llamarl.EXPERIMENT,
    name="llamarl_late",
    setup="As above, with samples of up to 16 steps before.",
    rule="Cap 2 at lag 8 keeps 0.9 of its success at lag 1; no correction at lag 16 is below cap 2 in every seed, by 0.05 or "
    "more in the mean.",
    arms=tuple(arm(lag, kind) for lag in LAGS for kind in KINDS),
    judge=judge,
    figure=lines(
        "success",
        {kind: {lag: arm(lag, kind) for lag in LAGS} for kind in KINDS},
        "staleness, steps of one update",
    ),
    quick_arms=(arm(8, "cap 2"), arm(8, "no correction")),
)
