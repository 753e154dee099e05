"""AstraFlow, M2PO: a bound on the second moment of the ratio learns from very stale samples, PPO's clip does not."""

from __future__ import annotations

from typing import Any

from experiments.base import Experiment, Figures, Results, Verdict, all_of, beats, keeps
from experiments.reports import lines

LAGS = (0, 16, 64)
STEPS = 192  # three times the largest lag
CLIP: dict[str, Any] = {
    "transforms": [],
    "losses": [{"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2, "anchor": "rollout"}],
}
"""What is changed in the preset `m2po_paper` for GRPO with PPO's clip."""


def arm(lag: int, kind: str) -> str:
    return f"lag {lag}, {kind}"


def run(name: str, seed: int, quick: bool, rate: float = 3e-3) -> Figures:
    from experiments.tiny import learned, tiny

    lag, kind = int(name.split()[1].rstrip(",")), name.split(", ")[1]
    with tiny(
        seed,
        f"trainer.lr={rate}",
        "rollout.samples_per_prompt=4",
        preset="m2po_paper",
        algorithm=CLIP if kind == "PPO clip" else {},
    ) as made:
        return learned(made, 3 if quick else STEPS, 1 if quick and lag else lag)


def parts(results: Results) -> tuple[Verdict, Verdict]:
    return keeps(results, arm(64, "M2PO"), arm(0, "M2PO")), beats(
        results, arm(64, "M2PO"), arm(64, "PPO clip")
    )


def judge(results: Results) -> Verdict:
    return all_of(*parts(results))


EXPERIMENT = Experiment(
    name="astraflow",
    system="AstraFlow and M2PO (arXiv 2605.15565, 2510.01161): very stale samples",
    claim="Training on samples 256 updates old matches training on fresh ones with M2PO, and does not with GRPO's clip.",
    setup=f"Preset `m2po_paper` (4 updates per step, mask at 0.04) and the same with PPO's clip of 0.2 in place of the mask; "
    f"{STEPS} steps on `Spelling`, samples exactly `lag` steps old.",
    rule="M2PO at lag 64 keeps 0.9 of its success at lag 0; PPO's clip at lag 64 is below M2PO in every seed, by 0.05 or more in "
    "the mean.",
    arms=tuple(arm(lag, kind) for lag in LAGS for kind in ("PPO clip", "M2PO")),
    columns=("success", "halfway", "clip_fraction", "kept", "collapsed"),
    run=run,
    judge=judge,
    figure=lines(
        "success",
        {kind: {lag: arm(lag, kind) for lag in LAGS} for kind in ("M2PO", "PPO clip")},
        "staleness, steps of 4 updates",
    ),
    quick_arms=(arm(16, "PPO clip"), arm(16, "M2PO")),
)
