"""The learning rate as a pure function of the step, the same for every trainer. (step, lr,
**options) -> rate.

`step` counts optimizer steps from 0. Warm-up is linear: lr / warmup_steps at step 0, lr from step
warmup_steps - 1 on."""

from __future__ import annotations

import math

from rlflow.components import Kind
from rlflow.errors import ConfigError
from rlflow.values import NonNegativeFloat, NonNegativeInt, PositiveInt

SCHEDULE = Kind("schedule", __name__, call=2)
BUILT_IN = {name: f"{__name__}:{name}" for name in ("constant", "cosine", "linear")}
"""Name -> `module:Name`."""


def constant(step: int, lr: float, warmup_steps: NonNegativeInt = 0) -> float:
    """lr after the warm-up."""
    return lr * (step + 1) / warmup_steps if step < warmup_steps else lr


def linear(
    step: int,
    lr: float,
    decay_steps: PositiveInt,
    warmup_steps: NonNegativeInt = 0,
    min_lr: NonNegativeFloat = 0.0,
) -> float:
    """A straight line from lr at step warmup_steps to min_lr at step decay_steps and beyond."""
    _check_min_lr(lr, min_lr)
    if step < warmup_steps or step >= decay_steps:
        return constant(step, lr, warmup_steps) if step < warmup_steps else min_lr
    return min_lr + (lr - min_lr) * (1 - (step - warmup_steps) / (decay_steps - warmup_steps))


def cosine(
    step: int,
    lr: float,
    decay_steps: PositiveInt,
    warmup_steps: NonNegativeInt = 0,
    min_lr: NonNegativeFloat = 0.0,
) -> float:
    """Half a cosine from lr at step warmup_steps to min_lr at step decay_steps and beyond."""
    _check_min_lr(lr, min_lr)
    if step < warmup_steps or step >= decay_steps:
        return constant(step, lr, warmup_steps) if step < warmup_steps else min_lr
    done = (step - warmup_steps) / (decay_steps - warmup_steps)
    return min_lr + (lr - min_lr) * ((1 + math.cos(math.pi * done)) / 2)


def _check_min_lr(lr: float, min_lr: float) -> None:
    if min_lr > lr:
        raise ConfigError(
            f"trainer.schedule.min_lr: expected at most trainer.lr = {lr:g}, found {min_lr:g}."
        )
