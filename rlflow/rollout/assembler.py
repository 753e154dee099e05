"""Attempts that end in any order become groups, with their statistics stamped while they are whole."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from rlflow.errors import RolloutError
from rlflow.types import Group, Task, Trajectory


@dataclass
class OpenGroup:
    """A group of `size` attempts, of which `ended` are over: trajectories by the attempt's number."""

    task: Task
    size: int
    ended: dict[int, Trajectory] = field(default_factory=dict)


class GroupAssembler:
    """Knows which attempts belong to which group, and hands out a group when its last attempt ended."""

    def __init__(self) -> None:
        self._open: dict[str, OpenGroup] = {}

    def expect(self, group_id: str, task: Task, size: int) -> None:
        """Announces a group of `size` attempts. Raises RolloutError where the id is in use."""
        if group_id in self._open:
            raise RolloutError(f"rollout: group '{group_id}' is being collected already; group ids must differ.")
        self._open[group_id] = OpenGroup(task, size)

    def add(self, group_id: str, attempt: int, trajectory: Trajectory) -> Group | None:
        """The whole group if this was the last of its attempts, in their order and stamped; else None."""
        group = self._open[group_id]
        group.ended[attempt] = trajectory
        if len(group.ended) < group.size:
            return None
        del self._open[group_id]
        trajectories = [group.ended[number] for number in sorted(group.ended)]
        stamp(trajectories)
        return Group(group_id, group.task, trajectories)


def stamp(trajectories: list[Trajectory]) -> None:
    """Writes (size, mean, std with Bessel's correction) of the usable attempts' rewards on each of them, named ones too."""
    usable = [trajectory for trajectory in trajectories if trajectory.usable]
    if not usable:
        return
    stats = (len(usable), *_mean_and_std([trajectory.reward for trajectory in usable]))
    names = sorted({name for trajectory in usable for name in trajectory.rewards})
    by_name = {name: _mean_and_std([trajectory.rewards.get(name, 0.0) for trajectory in usable]) for name in names}
    for trajectory in usable:
        trajectory.group_stats, trajectory.rewards_stats = stats, dict(by_name)


def _mean_and_std(values: list[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
