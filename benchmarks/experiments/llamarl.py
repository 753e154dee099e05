"""LlamaRL: AIPO, an importance ratio with an upper bound, keeps the quality of asynchronous training."""

from __future__ import annotations

from typing import Any

from experiments.base import Experiment, Figures, Results, Verdict, all_of, beats, keeps
from experiments.reports import lines

LAGS = (1, 4, 8)
STEPS = 100
NO_BOUND = 1e6
LOSSES: dict[str, dict[str, Any]] = {
    "cap 2": {"name": "aipo", "max_ratio": 2.0},
    "cap off": {"name": "aipo", "max_ratio": NO_BOUND},
    "no correction": {"name": "reinforce"},
}


def arm(lag: int, kind: str) -> str:
    return f"lag {lag}, {kind}"


def run(name: str, seed: int, quick: bool) -> Figures:
    from experiments.tiny import learned, tiny

    lag, kind = int(name.split()[1].rstrip(",")), name.split(", ")[1]
    with tiny(
        seed, "trainer.lr=5e-3", preset="llamarl_aipo", algorithm={"losses": [LOSSES[kind]]}
    ) as made:
        return learned(made, 3 if quick else STEPS, 1 if quick else lag)


def judge(results: Results) -> Verdict:
    return all_of(
        keeps(results, arm(8, "cap 2"), arm(1, "cap 2")),
        beats(results, arm(8, "cap 2"), arm(8, "no correction")),
    )


EXPERIMENT = Experiment(
    name="llamarl",
    system="LlamaRL (arXiv 2505.24034): AIPO on samples that are some steps late",
    claim="Asynchronous training with AIPO (ratio to the rollout policy, at most 2 to 10) keeps the quality of synchronous "
    "training.",
    setup=f"Preset `llamarl_aipo` (one update per step, cap 2), the same without the cap, and with `reinforce` in its place; "
    f"{STEPS} steps on `Spelling`, samples exactly `lag` steps old.",
    rule="Cap 2 at lag 8 keeps 0.9 of its success at lag 1; no correction at lag 8 is below cap 2 in every seed, by 0.05 or more "
    "in the mean.",
    arms=tuple(arm(lag, kind) for lag in LAGS for kind in LOSSES),
    columns=("success", "halfway", "ratio", "clip_fraction", "collapsed"),
    run=run,
    judge=judge,
    figure=lines(
        "success",
        {kind: {lag: arm(lag, kind) for lag in LAGS} for kind in LOSSES},
        "staleness, steps of one update",
    ),
    quick_arms=(arm(4, "cap 2"), arm(4, "no correction")),
)
