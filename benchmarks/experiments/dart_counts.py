"""DART: attempts and turns by task, for an equal number of turns."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from experiments.base import TRAINING, Experiment, Figures, Results, Verdict, all_of, average, beats
from experiments.curves import curves

EACH = 6
LENGTHS = [2] * EACH + [3] * EACH
KEYS, LONGEST = 4, 8
PROMPTS, ATTEMPTS = 6, 8
MEASURES, TURNS = 8, 24_000
SLOWER, RATE = ", at 2e-3", "trainer.lr=2e-3"  # of 5e-3
BARE = ("algorithm.filters=[]", "algorithm.transforms=[]")
GRPO, COUNTS, BOTH, ALL = (
    "step-wise GRPO",
    "+ counts by task",
    "+ lengths by task",
    "+ pool, entropy, correction",
)
ARMS: dict[str, tuple[str, ...]] = {
    GRPO: BARE,
    COUNTS: (*BARE, "data.curator={name: adaptive, lengths: false}"),
    BOTH: (*BARE, "data.curator=adaptive"),
    ALL: ("data.curator=adaptive",),
    f"{GRPO}{SLOWER}": (*BARE, RATE),
    f"{BOTH}{SLOWER}": (*BARE, "data.curator=adaptive", RATE),
}


def run(arm: str, seed: int, quick: bool) -> Figures:
    """success: of all tasks, the mean of the last three measures; success_long: of the longest at the last one; steps: made."""
    from experiments.dart import disturbed
    from experiments.small_run import small_run, some_demonstrations
    from experiments.tasks.keys import REFERENCE, Keys

    options = {"lengths": LENGTHS, "keys": KEYS, "seed": seed, "wander": LONGEST}
    task = Keys(**options)
    overrides = (f"rollout.prompts_per_step={PROMPTS}", *ARMS[arm])
    environment = {"name": REFERENCE, **options}
    noise = disturbed(seed)
    with small_run(
        seed, environment, task.characters, *overrides, preset="dart", as_sampled=noise
    ) as small:
        small.warm_up(
            some_demonstrations(small, task, task.press_any, seed, max(LENGTHS)), 4 if quick else 30
        )
        curve, longest, played = [], 0.0, 0
        for measure in range(1, (1 if quick else MEASURES) + 1):
            until = 1 if quick else measure * TURNS // MEASURES
            while played < until:
                small.step()
                played += sum(
                    len(one.turns) for group in small.sampled for one in group.trajectories
                )
            success, longest = measured(small)
            curve.append(success)
        return {
            "success": sum(curve[-3:]) / len(curve[-3:]),
            "success_long": longest,
            "steps": small.steps,
            "curve": curve,
        }


def measured(small: Any) -> tuple[float, float]:
    """(success of all tasks, of the longest), attempts that nothing is trained on."""
    groups = small.rollout.collect(
        small.rollout.environment.tasks("train"), step=-1, samples_per_prompt=ATTEMPTS
    )
    found = [[one.metrics.get("success", 0.0) for one in group.usable] for group in groups]
    means = [sum(one) / len(one) for one in found]
    return sum(means) / len(means), sum(means[-EACH:]) / EACH


def judge(results: Results) -> Verdict:
    rungs = []
    for before, arm in pairwise((GRPO, COUNTS, BOTH)):
        one, other = average(results, arm, "success"), average(results, before, "success")
        rungs.append((one > other, f"'{arm}' has {one:.3g} after {other:.3g}"))
    return all_of(*rungs, beats(results, BOTH, GRPO))


EXPERIMENT = Experiment(
    name="dart_counts",
    system="DART: attempts and turns by task",
    claim=(
        "Attempts by a task's rate of success raise success from 28.7 to 50.9%, its longest success as the limit of turns to "
        "66.1%: most of what the whole ladder gains (a part of OSWorld; arXiv 2509.23866)."
    ),
    setup=(
        f"{2 * EACH} tasks of pressing 2 or 3 of {KEYS} keys in order, blind; an attempt that went wrong goes on for {LONGEST} "
        f"turns. Every arm has {TURNS:,} turns of training, {PROMPTS} tasks x {ATTEMPTS} attempts a step at the most. The engine "
        "samples from disturbed weights as under `dart`. Not judged: the preset `dart` with the curator "
        "`adaptive`, and both ends of what is judged at a lower rate, as shorter attempts make more updates."
    ),
    rule=(
        "At an equal number of turns either rung raises the mean success, and both together have more than neither in every "
        "seed, by 0.05 in the mean."
    ),
    arms=tuple(ARMS),
    columns=("success", "success_long", "steps"),
    run=run,
    judge=judge,
    figure=curves(
        "curve", f"turns of training, {TURNS // MEASURES:,} each", "success, all tasks", window=1
    ),
    imports=(*TRAINING, "experiments.small_run"),
    quick_arms=(GRPO, BOTH),
    deadline_s=900.0,  # for a machine that is busy; it takes a tenth of that
)
