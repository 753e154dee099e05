"""Trajectory-aware relative policy optimization of Mobile-Agent-v3, against GRPO and without the replay of successes."""

from __future__ import annotations

from experiments.base import TRAINING, Experiment, Figures, Results, Verdict, all_of, beats, keeps
from experiments.curves import at_the_end, curves

TASKS, LENGTH, KEYS = 12, 5, 3
FLAKY = 0.1  # share of presses that the environment loses
STEPS = 60
PARTS = {
    "GRPO": ("algorithm.advantage=grpo", "algorithm.filters=[]", "algorithm.transforms=[]"),
    "trajectory-aware, without replay": ("algorithm.filters=[]",),
    "trajectory-aware": (),  # all of the preset
}


def run(arm: str, seed: int, quick: bool, length: int = LENGTH, steps: int = STEPS) -> Figures:
    """success: at the end; successes: episodes of the first quarter that succeeded, which is how rare it was; rescued: groups per
    step that failed as a whole and got a stored success."""
    from experiments.small_run import small_run, some_demonstrations
    from experiments.tasks.keys import REFERENCE, Keys

    lengths = [length] * TASKS
    task = Keys(lengths, KEYS, FLAKY, seed)
    environment = {
        "name": REFERENCE,
        "lengths": lengths,
        "keys": KEYS,
        "flaky": FLAKY,
        "seed": seed,
    }
    with small_run(
        seed, environment, task.characters, *PARTS[arm], preset="mobile_agent_trpo"
    ) as small:
        small.warm_up(
            some_demonstrations(small, task, task.press_any, seed, length + 2), 4 if quick else 30
        )
        rows = [small.step() for _ in range(2 if quick else steps)]
    curve = [row["train/success"] for row in rows]
    first = curve[: max(1, len(curve) // 4)]
    return {
        "success": at_the_end(curve),
        "successes": 64 * sum(first),
        "rescued": sum(row.get("train/groups_rescued", 0.0) for row in rows) / len(rows),
        "curve": curve,
    }


def judge(results: Results) -> Verdict:
    whole, bare, grpo = "trajectory-aware", "trajectory-aware, without replay", "GRPO"
    return all_of(beats(results, whole, bare), keeps(results, whole, grpo, share=1.0))


EXPERIMENT = Experiment(
    name="mobile_agent",
    system="Mobile-Agent-v3: trajectory-aware relative policy optimization",
    claim="It learns online what offline filtering and a run without replay do not (29.4 to 34.9 on OSWorld; arXiv 2508.15144).",
    setup=(
        f"{TASKS} tasks of {LENGTH} keys of {KEYS} in order, blind (1 in 243 by chance), 1 or 0 at the end, -0.5 for a response "
        f"that is no key; a tenth of the presses is lost. {STEPS} steps of 8 tasks x 8 attempts, the preset `mobile_agent_trpo`; "
        "GRPO has its kernel without row weights and pool. Equal environment steps in all arms."
    ),
    rule="Replay beats no replay in every seed, by 0.05 in the mean, and the mean success is no less than GRPO's.",
    arms=tuple(PARTS),
    columns=("success", "successes", "rescued"),
    run=run,
    judge=judge,
    figure=curves("curve", ylabel="success"),
    imports=(*TRAINING, "experiments.small_run"),
    deadline_s=900.0,  # for a machine that is busy; it takes a tenth of that
)
