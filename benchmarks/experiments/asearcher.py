"""ASearcher: what a policy can answer that was trained with few turns."""

from __future__ import annotations

from typing import Any

from experiments.base import (
    TRAINING,
    Experiment,
    Figures,
    Results,
    Verdict,
    all_of,
    average,
    beats,
    values,
)
from experiments.curves import curves

STEPS = 45
LR = 2e-3
DEMONSTRATIONS, ROUNDS, UPDATES = 256, 3, 80  # of the warm-up: new ones in every round
ARMS = ("4 turns", "12 turns")
EVALUATED = 12
FAR = 4  # hops beyond which a policy of 4 turns cannot have answered in training
LEARNED = 0.8


def run(arm: str, seed: int, quick: bool) -> Figures:
    """near and far: exact match of questions of up to 4 hops, and of more, in 12 turns; turns: per question there; learned: exact
    match in the last quarter of training."""
    from experiments.small_run import small_run, some_demonstrations
    from experiments.tasks.chains import MOST_HOPS, REFERENCE, Chains

    turns, *most = (int(word) for word in arm.split() if word.isdecimal())
    task = Chains(turns, seed)
    environment = {
        "name": REFERENCE,
        "turns": turns,
        "seed": seed,
        "hops": most[0] if most else MOST_HOPS,
    }
    overrides = (
        "rollout.max_response_tokens=2", "rollout.samples_per_prompt=8", "rollout.prompts_per_step=16", f"trainer.lr={LR}",
    )  # fmt: skip
    with small_run(seed, environment, task.characters, *overrides, preset="asearcher") as small:
        for part in range(1 if quick else ROUNDS):  # the same start for both arms
            shown = some_demonstrations(
                small, task, task.follow, ROUNDS * seed + part, EVALUATED, DEMONSTRATIONS
            )
            small.warm_up(shown, 4 if quick else UPDATES)
        rows = [small.step() for _ in range(2 if quick else STEPS)]
        with small_run(
            seed,
            {**environment, "turns": EVALUATED, "hops": MOST_HOPS},
            task.characters,
            *overrides,
        ) as other:
            groups = evaluated(other, small, 8 if quick else 256)
    right: dict[int, list[float]] = {hops: [] for hops in range(1, MOST_HOPS + 1)}
    for group in groups:
        right[group.task.metadata["hops"]] += [
            one.metrics.get("exact_match", 0.0) for one in group.usable
        ]
    by_hops = [sum(found) / len(found) for found in right.values()]
    played = [len(one.turns) for group in groups for one in group.usable]
    return {
        "near": sum(by_hops[:FAR]) / FAR,
        "far": sum(by_hops[FAR:]) / (MOST_HOPS - FAR),
        "turns": sum(played) / len(played),
        "learned": sum(row["train/exact_match"] for row in rows[-15:]) / len(rows[-15:]),
        "by_hops": by_hops,
        "curve": [row["train/exact_match"] for row in rows],
    }


def evaluated(other: Any, small: Any, questions: int) -> list[Any]:
    """Two attempts at questions that were not trained on, by the trained policy in the other run's environment."""
    other.rollout.load_weights(small.trainer.weights(), 1)
    return list(
        other.rollout.collect(
            other.rollout.environment.tasks("val")[:questions], step=-1, samples_per_prompt=2
        )
    )


def judge(results: Results) -> Verdict:
    few = values(results, "4 turns", "far")
    near = [average(results, arm, "near") for arm in ARMS]
    told = f"trained with 4 turns, {max(few):.2g} of the questions beyond {FAR} hops at the most"
    told_near = f"up to {FAR} hops {near[0]:.2g} and {near[1]:.2g}"
    learned = values(results, "12 turns", "learned")
    told_learned = (
        f"trained with 12 turns, at least {min(learned):.2g} of the training questions at the end"
    )
    return all_of(
        (min(learned) >= LEARNED, told_learned),
        (max(few) <= 0.05, told),
        beats(results, "12 turns", "4 turns", "far", by=0.2),
        (True, told_near),
    )


EXPERIMENT = Experiment(
    name="asearcher",
    system="ASearcher: turn limits",
    claim="Small turn limits (10 or fewer) keep a search agent from learning long strategies (arXiv 2508.07976).",
    setup=(
        "Where does the way from an entity end: 1 to 8 hops, one look-up each, and an answer (of h hops: h + 1 turns). The start "
        "knows how to name what it was shown, in up to 12 turns, and not when to answer. "
        f"{STEPS} steps of 16 questions x 8 attempts, the preset `asearcher` at a rate of {LR:g}, trained with 4 and with 12 "
        "turns, evaluated with 12 on other questions. Rate, steps and warm-up were chosen on the arm of 12 turns alone, with "
        "other seeds."
    ),
    rule=(
        f"In every seed the policy of 12 turns comes to {LEARNED:.0%} of its questions in training, that of 4 turns is right in "
        f"at most 5% of the questions of more than {FAR} hops, and that of 12 turns is better there, by 20 points in the mean."
    ),
    arms=ARMS,
    columns=("near", "far", "turns", "learned"),
    run=run,
    judge=judge,
    figure=curves("by_hops", "hops", f"exact match in {EVALUATED} turns", window=1),
    imports=(*TRAINING, "experiments.small_run"),
    version=2,
    deadline_s=900.0,  # for a machine that is busy; it takes a tenth of that
)
