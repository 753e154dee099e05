"""The learning rate as a pure function of the step, the same for every trainer."""

from __future__ import annotations

import math

from rlflow.errors import ConfigError, did_you_mean

SCHEDULES = ("constant", "cosine", "linear")


def learning_rate(
    step: int, *, lr: float, schedule: str, warmup_steps: int, decay_steps: int | None, min_lr: float
) -> float:
    """The rate of optimizer step `step`, counted from 0.

    Warm-up is linear: lr / warmup_steps at step 0, lr from step warmup_steps - 1 on. After it the rate stays
    (constant) or falls along a straight line or half a cosine, from lr at step warmup_steps to min_lr at step
    decay_steps and beyond. Raises ConfigError for an unknown schedule, and for a decay whose end is not given.
    """
    if schedule not in SCHEDULES:
        hint = did_you_mean(schedule, SCHEDULES)
        raise ConfigError(f"trainer.lr_schedule: expected one of {', '.join(SCHEDULES)}, found '{schedule}'.{hint}")
    if schedule != "constant" and decay_steps is None:
        raise ConfigError(f"trainer.lr_decay_steps: the {schedule} schedule needs the step at which min_lr is reached")
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "constant" or decay_steps is None:
        return lr
    if step >= decay_steps:
        return min_lr
    done = (step - warmup_steps) / (decay_steps - warmup_steps)
    left = 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return min_lr + (lr - min_lr) * left
