"""DART's ladder (arXiv 2509.23866): what each of its parts adds where some tasks are never solved at first.

24 tasks, of which the 8 longest are solved by chance once in 3125 attempts: 8 attempts at each of 12 tasks, 50 steps. In all
arms the engine samples from other weights than those that are trained (noise of 10% of each tensor's deviation, drawn anew at
every step), so that there is something to correct. The pool has one success of each of the long tasks from the start, as the
paper's was collected before the run.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from benchmarks.experiments.keys import REFERENCE, Keys
from benchmarks.experiments.small_run import SmallRun, Weights, demonstration, share_of
from rlflow.algorithms.remembered import trajectories_state
from rlflow.types import Trajectory

SHORT, LONG = 16, 8
LENGTHS = [2] * SHORT + [5] * LONG
KEYS = 5
STEPS = 50
NOISE = 0.1
ARMS = ("step-wise GRPO", "+ success pool", "+ entropy steps", "+ correction")
_PARTS = {
    "step-wise GRPO": ("algorithm.filters=[]", "algorithm.transforms=[]"),
    "+ success pool": ("algorithm.transforms=[]",),
    "+ entropy steps": ("algorithm.transforms=[{name: high_entropy_steps, drop: 0.2, over: group}]",),
    "+ correction": (),  # the preset
}


def run(arm: str, seed: int, quick: bool = False) -> dict[str, Any]:
    """The success of an arm by step, of all tasks and of the long ones."""
    environment = {"name": REFERENCE, "lengths": LENGTHS, "keys": KEYS, "seed": seed}
    task = Keys(LENGTHS, KEYS, seed=seed)

    def disturbed(weights: Weights, version: int) -> Iterable[tuple[str, Tensor]]:
        draw = torch.Generator().manual_seed(1_000_003 * seed + version)
        for name, value in weights:
            spread = value.std() if value.numel() > 1 else torch.tensor(0.0)
            yield name, value + NOISE * spread * torch.randn(value.shape, generator=draw)

    values = ("rollout.prompts_per_step=12", *_PARTS[arm])
    with SmallRun(environment, task.characters, seed, *values, preset="dart", as_sampled=disturbed) as small:
        draw = random.Random(seed)
        some = [demonstration(small.tokenizer, task, draw.choice(task.tasks("train")), task.press_any, draw, 5) for _ in range(256)]
        small.warm_up(some, 4 if quick else 40)
        for part in small.algorithm.filters:
            part.load_state_dict({"draws": 0, **trajectories_state(collected_before(small, task))})
        small.begin()
        rows = [small.step() for _ in range(2 if quick else STEPS)]
    curve, long = [row["train/success"] for row in rows], [row.get("train/success_long", 0.0) for row in rows]
    gap = sum(row["train/logprob_gap"] for row in rows) / len(rows)
    return {"success": share_of(curve), "success_long": share_of(long), "curve": curve, "gap": gap}


def collected_before(small: SmallRun, task: Keys) -> list[Trajectory]:
    """A success of each of the long tasks."""
    found = []
    for problem in task.tasks("train")[SHORT:]:
        keys = iter(problem.answer)
        found.append(demonstration(small.tokenizer, task, problem, lambda seen, draw, keys=keys: next(keys), random.Random(0), 5))
    return found
