"""ML-engineering agents: duration-aware gradients where slow and good programs compete with quick and poor ones."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import fmean
from typing import Any

from experiments.base import TRAINING, Experiment, Figures, Results, Verdict, all_of, average, values
from experiments.curves import curves

ACTORS = 16
SECONDS_IN_ALL, WINDOW_S = 12.0, 0.25
UNWEIGHTED, WEIGHTED = "algorithm.transforms=[]", "algorithm.transforms=[{name: duration_weight, floor_s: 0.001}]"
PARTS = {
    "unweighted": (UNWEIGHTED, True),
    "by duration": (WEIGHTED, True),
    "unweighted, none broken": (UNWEIGHTED, False),
    "by duration, none broken": (WEIGHTED, False),
}


def run(
    arm: str,
    seed: int,
    quick: bool,
    parts: dict[str, tuple[str, bool]] = PARTS,
    make: Callable[[int], tuple[Any, dict[str, Any]]] | None = None,
    actors: int = ACTORS,
    seconds_in_all: float = SECONDS_IN_ALL,
    window_s: float = WINDOW_S,
) -> Figures:
    """slow: the policy's share of the slow program among the two that work, exact, at the end; lowest: the least that it was;
    reward: expected at the end; updates, programs: how many there were. parts: arm -> (overrides, whether there is a broken
    program). make: seed -> (task, the environment section); none: programs that sleep."""
    import random

    from experiments.actors import Actors
    from experiments.small_run import CRITIC, demonstration, small_run
    from experiments.tasks.programs import BROKEN, CHOICE, QUICK, SLOW, Choice

    transforms, broken = parts[arm]
    families = QUICK + SLOW + (BROKEN if broken else "")
    task, environment = (Choice(), {"name": CHOICE}) if make is None else make(seed)
    problem, draw = task.tasks("train")[0], random.Random(seed)
    overrides = (*transforms.split("\n"), *([] if "baseline" in transforms else [CRITIC]), "rollout.samples_per_prompt=1")
    with small_run(seed, environment, task.characters, *overrides, preset="mle_duration") as small:
        said = [
            demonstration(
                small.tokenizer, task, problem, lambda seen, draw, place=place: families[place % len(families)], draw, 1
            )
            for place in range(120)
        ]
        small.warm_up(said, 4 if quick else 30)
        small.begin()
        curve, programs = [share_of_slow(small)[0]], 0
        with Actors(small.rollout, problem, actors) as actors:
            end = time.monotonic() + (1.0 if quick else seconds_in_all)
            while time.monotonic() < end:
                time.sleep(window_s)
                groups = actors.finished()
                programs += len(groups)
                if groups:
                    small.train(groups)
                    curve.append(share_of_slow(small)[0])
        share, reward = share_of_slow(small)
    counts = {"updates": float(len(curve) - 1), "programs": float(programs)}
    return {"slow": share, "lowest": min(curve), "reward": reward, **counts, "curve": curve}


def share_of_slow(small: Any) -> tuple[float, float]:
    """(the slow program's share of the chance of the two that work, the expected reward of the three)."""
    from experiments.tasks.programs import QUICK, SCORES, SLOW
    from rlflow.batching import token_batch

    rows = [small.tokenizer.encode("?" + program) for program in SCORES]
    scores = small.trainer.score(token_batch(rows))["logprobs"]
    chances = {program: math.exp(float(scores[row, 1])) for row, program in enumerate(SCORES)}
    reward = sum(chances[program] * score for program, score in SCORES.items()) / sum(chances.values())
    return chances[SLOW] / (chances[SLOW] + chances[QUICK]), reward


def judge(results: Results) -> Verdict:
    off, on = values(results, "unweighted", "slow"), values(results, "by duration", "slow")
    bare = [average(results, arm, "slow") for arm in ("unweighted, none broken", "by duration, none broken")]
    lowest = average(results, "unweighted", "lowest")
    told = f"the slow program's share is {fmean(off):.3g} unweighted ({lowest:.3g} at its least)"
    told_on = f"{fmean(on):.3g} by duration; where none is broken {bare[0]:.3g} and {bare[1]:.3g}"
    return all_of((max(off) < 0.5, told), (min(on) > 0.8, told_on))


EXPERIMENT = Experiment(
    name="mle_duration",
    system="RL for ML-engineering agents: duration-aware gradients",
    claim=(
        "Asynchronous actors finish quick programs more often, so that they win although they are poor; weights by duration undo "
        "that (+3.85%; arXiv 2509.01684)."
    ),
    setup=(
        f"A program of 0.02 s that scores 0.6, of 0.2 s that scores 0.9, and a broken one (0.02 s, -10). {ACTORS} actors run "
        f"what the policy says, one after another, in real seconds; every {WINDOW_S} s the learner takes what has ended. "
        f"{SECONDS_IN_ALL:.0f} s in all arms, the preset `mle_duration` (its least duration 1 ms in place of 0.1 s)."
    ),
    rule="The slow program's share of the two that work ends below 0.5 unweighted and above 0.8 by duration, in every seed.",
    arms=tuple(PARTS),
    columns=("slow", "lowest", "reward", "updates", "programs"),
    run=run,
    judge=judge,
    figure=curves("curve", "update", "share of the slow program", window=1),
    imports=(*TRAINING, "experiments.small_run"),
    deadline_s=900.0,  # for a machine that is busy; it takes a tenth of that
)
