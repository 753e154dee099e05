"""RLinf: what its ways of sampling and training save of a step of Search-R1, one at a time and together."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from experiments.base import (
    TRAINING,
    Experiment,
    Figures,
    Results,
    Verdict,
    all_of,
    average,
    values,
)

STEPS, SETTLED = 20, 3
LAST = 5  # steps of which the exact match is compared
CLAIMED = 1.55
WITHIN = 0.1
TOGETHER = "all five the old way"
IN_STEP = {"in_step": True}
SESSIONS = {"sessions": True}
AGAIN = {"encode_again": True}
SCORED = "algorithm.losses=[{name: ppo_clip, clip_low: 0.2, clip_high: 0.28, anchor: proximal}]"
SAMPLED = "algorithm.losses=[{name: ppo_clip, clip_low: 0.2, clip_high: 0.28}]"
PACKED, PADDED = "trainer.packing=true", "trainer.packing=false"
ARMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "as it is": ({}, SAMPLED, PACKED),
    "turns by batch": (IN_STEP, SAMPLED, PACKED),
    "a session per search": (SESSIONS, SAMPLED, PACKED),
    "log-probs computed again": ({}, SCORED, PACKED),
    "padded rows": ({}, SAMPLED, PADDED),
    "text encoded again": (AGAIN, SAMPLED, PACKED),
    TOGETHER: ({**IN_STEP, **SESSIONS, **AGAIN}, SCORED, PADDED),
}
"""Arm -> (options of the environment, losses, rows)."""


def run(arm: str, seed: int, quick: bool) -> Figures:
    """step_s: the median step's seconds, and its parts; success: exact match of the last steps."""
    import tempfile

    from experiments.tasks.old_ways import REFERENCE
    from rlflow.config.schema import load_config
    from rlflow.loop import train
    from rlflow.report.sinks import read_metrics

    root, options = Path(__file__).resolve().parents[2], ARMS[arm]
    demo = root / "recipes" / "searchr1" / "config" / "demo.yaml"
    with tempfile.TemporaryDirectory(prefix="rlflow-rlinf-") as folder:
        own = [f"environment.{name}=true" for name in options[0]]
        usual = (
            f"run.directory={folder}/{{name}}", "run.name=run", f"run.steps={2 if quick else STEPS}", f"run.seed={seed}",
            f"model.path={root / 'recipes/searchr1/starting_policy'}", f"environment.name={REFERENCE}",
            f"environment.world={{directory: '{folder}/world', seed: 7}}", "rollout.prompts_per_step=8",
            "trainer.schedule={name: constant}", "evaluation.every_steps=0", "evaluation.at_start=false",
            "evaluation.final_questions=4", "checkpoint.every_steps=0", "checkpoint.export=false", "metrics.picture=false",
            "metrics.progress=none",
        )  # fmt: skip
        config = load_config(demo, [*usual, *own, *options[1:]])
        train(config)
        rows = [
            row
            for row in read_metrics(Path(folder) / "run" / "metrics.jsonl")
            if "train/loss" in row
        ]
    settled = rows[0 if quick else SETTLED :]
    parts = {
        name: [row.get(f"time/{name}_s", 0.0) for row in settled]
        for name in ("step", "rollout", "score", "update")
    }
    return {
        **{f"{name}_s": statistics.median(found) for name, found in parts.items()},
        "success": statistics.fmean(row["train/exact_match"] for row in rows[-LAST:]),
        "curve": [row["train/exact_match"] for row in rows],
    }


def judge(results: Results) -> Verdict:
    base, old = values(results, "as it is", "step_s"), values(results, TOGETHER, "step_s")
    ratios = [other / one for one, other in zip(base, old, strict=True)]
    apart = average(results, TOGETHER, "success") - average(results, "as it is", "success")
    told = f"all old ways together take {min(ratios):.2f} to {max(ratios):.2f} of a step's seconds"
    return all_of(
        (min(ratios) >= CLAIMED, told),
        (abs(apart) <= WITHIN, f"exact match of the last {LAST} steps differs by {abs(apart):.2f}"),
    )


EXPERIMENT = Experiment(
    name="rlinf",
    system="RLinf: a step of Search-R1",
    claim="Its Search-R1 trains 55% faster than the original at matching curves (RLinf's documentation; no table).",
    setup=(
        f"The demo with 8 questions x 8 attempts, {STEPS} steps, a retrieval server beside it, no KL. What differs: "
        "turns as each request ends or in step, kept connections or a session per search, log-probs of the sampler or computed "
        "again, rows end to end or padded, ids kept or text encoded again with a row per turn. Seconds are the median step's on "
        "two cores."
    ),
    rule=(
        f"With all five the old way a step takes at least {CLAIMED} times as long in every seed, and the exact match of the last "
        f"{LAST} steps differs by at most {WITHIN} in the mean."
    ),
    arms=tuple(ARMS),
    columns=("step_s", "rollout_s", "score_s", "update_s", "success"),
    run=run,
    judge=judge,
    imports=TRAINING,
    quick_arms=("as it is", TOGETHER),
    deadline_s=600.0,
)
