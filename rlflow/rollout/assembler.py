"""Attempts that end in any order become groups, with their statistics stamped while they are whole."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlflow.errors import RolloutError
from rlflow.types import Group, Task, Trajectory, stamp


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
        whole = Group(group_id, group.task, [group.ended[number] for number in sorted(group.ended)])
        stamp(whole.trajectories)
        return whole
