"""DART's ladder: what each of its parts adds where some tasks are never solved at first."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from experiments.base import TRAINING, Experiment, Figures, Results, Verdict, all_of, beats, keeps
from experiments.curves import at_the_end, curves

SHORT, LONG = 16, 8
LENGTHS = [2] * SHORT + [5] * LONG
KEYS = 5
STEPS = 50
NOISE = 0.1  # of each tensor's deviation
PARTS = {
    "step-wise GRPO": ("algorithm.filters=[]", "algorithm.transforms=[]"),
    "+ success pool": ("algorithm.transforms=[]",),
    "+ entropy steps": (
        "algorithm.transforms=[{name: high_entropy_steps, drop: 0.2, over: group}]",
    ),
    "+ correction": (),  # all of the preset
}


def run(arm: str, seed: int, quick: bool) -> Figures:
    """success: of all tasks, at the end; success_long: of the long ones; gap: of the engine's log-probs to the trainer's."""
    from experiments.small_run import small_run, some_demonstrations
    from experiments.tasks.keys import REFERENCE, Keys
    from rlflow.rollout.codec import to_bytes

    task = Keys(LENGTHS, KEYS, seed=seed)
    environment = {"name": REFERENCE, "lengths": LENGTHS, "keys": KEYS, "seed": seed}
    overrides = ("rollout.prompts_per_step=12", *PARTS[arm])
    with small_run(
        seed, environment, task.characters, *overrides, preset="dart", as_sampled=disturbed(seed)
    ) as small:
        some = some_demonstrations(small, task, task.press_any, seed, max(LENGTHS))
        small.warm_up(some, 4 if quick else 30)
        for pool in small.algorithm.filters:
            pool.load_state_dict(
                {"draws": 0, "pool": to_bytes(collected_before(small.tokenizer, task))}
            )
        rows = [small.step() for _ in range(2 if quick else STEPS)]
    curve = [row["train/success"] for row in rows]
    return {
        "success": at_the_end(curve),
        "success_long": at_the_end([row.get("rollout/success_long", 0.0) for row in rows]),
        "gap": sum(row["train/logprob_gap"] for row in rows) / len(rows),
        "curve": curve,
    }


def disturbed(seed: int) -> Any:
    """The weights with noise, another one for every version."""
    import torch

    def noisy(weights: Any, version: int) -> Any:
        draw = torch.Generator().manual_seed(1_000_003 * seed + version)
        for name, value in weights:
            spread = value.std(correction=0)  # 0 for a bias or a norm that nothing has moved
            yield name, value + NOISE * spread * torch.randn(value.shape, generator=draw)

    return noisy


def collected_before(tokenizer: Any, task: Any) -> list[Any]:
    """A success of each of the long tasks."""
    import random

    from experiments.small_run import demonstration

    found = []
    for problem in task.tasks("train")[SHORT:]:
        keys = iter(problem.answer)
        right = demonstration(
            tokenizer,
            task,
            problem,
            lambda seen, draw, keys=keys: next(keys),
            random.Random(0),
            max(LENGTHS),
        )
        found.append(right)
    return found


def judge(results: Results) -> Verdict:
    rungs = [keeps(results, arm, before, share=1.0) for before, arm in pairwise(PARTS)]
    return all_of(beats(results, "+ success pool", "step-wise GRPO"), *rungs)


EXPERIMENT = Experiment(
    name="dart",
    system="DART: the ladder of its parts",
    claim="Each part adds to the one before (28.7 to 72.3% on a part of OSWorld; arXiv 2509.23866).",
    setup=(
        "24 tasks of pressing keys in order, blind, 1 or 0 at the end; 8 of them take 5 right keys of 5 (1 in 3125 by chance). "
        f"{STEPS} steps of 12 tasks x 8 attempts, the preset `dart`. In all arms the engine samples from weights with noise of "
        "10% of each tensor's deviation, drawn at every step. The pool begins with one success of each long task. Counts and "
        "lengths by task (`adaptive`), which the paper gains most from, are no rungs: these tasks have fixed lengths."
    ),
    rule="The mean success falls at no rung, and the pool beats no pool in every seed, by 0.05 in the mean.",
    arms=tuple(PARTS),
    columns=("success", "success_long", "gap"),
    run=run,
    judge=judge,
    figure=curves("curve", ylabel="success, all tasks"),
    imports=(*TRAINING, "experiments.small_run"),
    deadline_s=900.0,  # for a machine that is busy; it takes a tenth of that
)
