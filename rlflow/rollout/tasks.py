"""The source of the tasks of one step after another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from rlflow.types import Task


@runtime_checkable
class TaskSource(Protocol):
    """An order of tasks and the position in it. The position is state of the source, not a function
    of the step: a filter that refuses groups makes a step take more tasks than another one."""

    def take(self, count: int) -> list[Task]:
        """The next `count` tasks; fewer, or none, where the source ends."""

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain data; part of a checkpoint."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
