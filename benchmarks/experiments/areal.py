"""AReaL: decoupled PPO keeps what it learns on stale samples, PPO against the rollout policy loses."""

from __future__ import annotations

from typing import Any

from experiments.base import Experiment, Figures, Results, Verdict, all_of, beats, keeps
from experiments.reports import lines

LAGS = (0, 1, 4, 16)
STEPS = 60
NAIVE: dict[str, Any] = {
    "transforms": [{"name": "normalize_advantages", "over": "tokens"}],
    "losses": [{"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2, "anchor": "rollout"}],
}
"""What is changed in the preset `areal` for PPO whose clip range is centred on the policy that sampled."""


def arm(lag: int, kind: str) -> str:
    return f"lag {lag}, {kind}"


def run(name: str, seed: int, quick: bool) -> Figures:
    from experiments.tiny import learned, tiny

    lag, kind = int(name.split()[1].rstrip(",")), name.split(", ")[1]
    with tiny(
        seed, "trainer.lr=3e-3", preset="areal", algorithm=NAIVE if kind == "naive" else {}
    ) as made:
        return learned(made, 3 if quick else STEPS, 1 if quick and lag else lag)


def judge(results: Results) -> Verdict:
    return all_of(
        keeps(results, arm(16, "decoupled"), arm(0, "decoupled")),
        beats(results, arm(16, "decoupled"), arm(16, "naive")),
    )


EXPERIMENT = Experiment(
    name="areal",
    system="AReaL (arXiv 2505.24298): stale samples, naive and decoupled PPO",
    claim="AIME24 at a staleness of 4: 42.2 with decoupled PPO, 23.3 with PPO against the rollout policy; at 16: 38.7 and 35.8; "
    "synchronous 42.0.",
    setup="Preset `areal` (4 updates per step, clip 0.2) and the same without `decoupled`, the clip centred on the rollout "
    f"policy; {STEPS} steps on `Spelling`, samples exactly `lag` steps old. Success is "
    "exact: the chance of a wholly right answer.",
    rule="Decoupled at lag 16 keeps 0.9 of the success at lag 0; naive at lag 16 is below decoupled in every seed, by 0.05 "
    "or more in the mean.",
    arms=tuple(arm(lag, kind) for lag in LAGS for kind in ("naive", "decoupled")),
    columns=("success", "halfway", "clip_fraction", "capped", "collapsed"),
    run=run,
    judge=judge,
    figure=lines(
        "success",
        {kind: {lag: arm(lag, kind) for lag in LAGS} for kind in ("decoupled", "naive")},
        "staleness, steps of 4 updates",
    ),
    quick_arms=(arm(4, "naive"), arm(4, "decoupled")),
)
