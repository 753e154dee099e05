"""Groups of made-up trajectories, for filters and curators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlflow.types import Group, Segment, StopReason, Task, Trajectory, Turn, stamp


def trajectory(
    task: str, reward: float, attempt: int = 0, version: int = 0, tokens: int = 4, **changes: Any
) -> Trajectory:
    """One segment: a prompt token, then sampled ones of that version, in one turn."""
    mask = torch.arange(tokens) > 0
    segment = Segment(
        torch.arange(tokens),
        mask,
        torch.where(mask, -0.1 * (attempt + 1), 0.0),
        torch.where(mask, version, -1),
    )
    turn = Turn(0, 1, tokens, reward, 0.5, f"said {attempt}", "seen")
    values = {
        "metrics": {"turns": 1.0},
        "attempt": attempt,
        "id": f"{task}/{attempt}/{version}",
        "prompt": task,
        **changes,
    }
    segments, stop = values.pop("segments", [segment]), values.pop("stop", StopReason.TERMINATED)
    return Trajectory(task, f"0:{task}", segments, [turn], reward, stop, **values)


def group(task: str, rewards: Sequence[float | None], version: int = 0, **changes: Any) -> Group:
    """A stamped group; None stands for an aborted attempt."""
    attempts = [
        trajectory(
            task,
            reward or 0.0,
            place,
            version,
            **({"stop": StopReason.ABORTED} if reward is None else changes),
        )
        for place, reward in enumerate(rewards)
    ]
    made = Group(f"0:{task}", Task(task, task), attempts)
    stamp(attempts)
    return made


def rewards(made: Group) -> list[float]:
    return [one.reward for one in made.trajectories]
