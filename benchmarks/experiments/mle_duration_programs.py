"""ML-engineering agents: duration-aware gradients where slow and good programs compete with quick and poor ones."""

from __future__ import annotations

import math
import time
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
from experiments.curves import curves

ACTORS = 4
SECONDS_IN_ALL, WINDOW_S = 60.0, 1.0
UNWEIGHTED, WEIGHTED = (
    "algorithm.transforms=[]",
    "algorithm.transforms=[{name: duration_weight, floor_s: 0.001}]",
)
BARE = (
    "algorithm.advantage={name: reinforce, baseline: none}",
    "algorithm.losses=[{name: ppo_clip, anchor: rollout}]",
    "algorithm.critic=null",
)
WITH_CRITIC = ("algorithm.critic={lr: 5e-3}",)
ARMS: dict[str, tuple[str, ...]] = {
    "unweighted, no baseline": (UNWEIGHTED, *BARE),
    "by duration, no baseline": (WEIGHTED, *BARE),
    "unweighted, critic": (UNWEIGHTED, *WITH_CRITIC),
    "by duration, critic": (WEIGHTED, *WITH_CRITIC),
}


def run(arm: str, seed: int, quick: bool) -> Figures:
    """slow: the policy's share of the slow program among the two that work, exact, at the end; lowest: the least that it was;
    updates, programs: how many there were."""
    import random

    from experiments.actors import Actors
    from experiments.small_run import demonstration, small_run
    from experiments.tasks.table_programs import CHOICE, QUICK, SLOW, Choice

    task, environment = Choice(seed), {"name": CHOICE, "seed": seed}
    problem, draw = task.tasks("train")[0], random.Random(seed)
    overrides = (*ARMS[arm], "rollout.samples_per_prompt=1")
    with small_run(seed, environment, task.characters, *overrides, preset="mle_duration") as small:
        said = [
            demonstration(
                small.tokenizer,
                task,
                problem,
                lambda seen, draw, place=place: (QUICK + SLOW)[place % 2],
                draw,
                1,
            )
            for place in range(120)
        ]
        small.warm_up(said, 4 if quick else 30)
        small.begin()
        curve, programs = [share_of_slow(small)], 0
        with Actors(small.rollout, problem, ACTORS) as actors:
            end = time.monotonic() + (4.0 if quick else SECONDS_IN_ALL)
            while time.monotonic() < end:
                time.sleep(WINDOW_S)
                groups = actors.finished()
                programs += len(groups)
                if groups:
                    small.train(groups)
                    curve.append(share_of_slow(small))
        share = share_of_slow(small)
    counts = {"updates": float(len(curve) - 1), "programs": float(programs)}
    return {"slow": share, "lowest": min(curve), **counts, "curve": curve}


def share_of_slow(small: Any) -> float:
    """The slow program's share of the chance of the two that work."""
    from experiments.tasks.table_programs import QUICK, SLOW
    from rlflow.batching import token_batch

    rows = [small.tokenizer.encode("?" + program) for program in (SLOW, QUICK)]
    scores = small.trainer.score(token_batch(rows))["logprobs"]
    slow, quick = (math.exp(float(scores[row, 1])) for row in range(2))
    return slow / (slow + quick)


def judge(results: Results) -> Verdict:
    off, on, *critic = ARMS
    unweighted, weighted = values(results, off, "slow"), values(results, on, "slow")
    told = ", ".join(f"{average(results, arm, 'slow'):.2f} ({arm})" for arm in critic)
    return all_of(
        (
            max(unweighted) < 0.5,
            f"without a baseline the slow program's share is at most {max(unweighted):.2f} unweighted",
        ),
        (min(weighted) > 0.8, f"at least {min(weighted):.2f} by duration"),
        (True, f"with a critic {told}"),
    )


EXPERIMENT = Experiment(
    name="mle_duration_programs",
    system="RL for ML-engineering agents: duration-aware gradients",
    claim=(
        "Asynchronous actors finish quick programs more often, so that they win although they are poor; weights by duration undo "
        "that (+3.85%; arXiv 2509.01684)."
    ),
    setup=(
        "The world `ml_engineering`: a table whose target is a wave of one feature and a line in another. A program in plain "
        "Python that knows the line, and one in numpy that chooses its nearest neighbours by cross-validation, in sandboxes, "
        f"scored by targets that they never see. {ACTORS} actors on two cores, {SECONDS_IN_ALL:.0f} s in all arms. Without a "
        "baseline the return itself weighs a sample, as where a critic has not learned yet: what the paper's argument is about."
    ),
    rule="Without a baseline the slow program's share ends below 0.5 unweighted and above 0.8 by duration, in every seed.",
    arms=tuple(ARMS),
    columns=("slow", "lowest", "updates", "programs"),
    run=run,
    judge=judge,
    figure=curves("curve", "update", "share of the slow program", window=1),
    imports=(*TRAINING, "experiments.small_run"),
    deadline_s=900.0,  # for a machine that is busy; it takes a tenth of that
)
