"""The Environment base class: text in, text out. Tokens are the Rollout's business."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from rlflow.types import Episode, Step, Task


class Environment(ABC):
    """One shared instance serves many episodes at the same time, so an episode's state lives in `episode.scratch`.

    `reset`, `step` and `close` may be plain or `async` methods; plain ones run in a thread. An exception that escapes
    from them aborts the episode: it is counted and kept out of loss and group baseline.
    """

    stop: tuple[str, ...] = ()
    """Stop strings of every turn, unless a Step says otherwise. The matched string is part of the response."""

    @abstractmethod
    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of "train" or "val", in a fixed order."""

    async def reset(self, task: Task) -> Episode:
        """A fresh episode of the task. The prompt that the policy sees is `episode.task.prompt`."""
        return Episode(task)

    @abstractmethod
    def step(self, episode: Episode, response: str) -> Any:  # Step, or an awaitable of one
        """Answers one response of the policy (its text, special tokens stripped) with a Step."""

    async def close(self, episode: Episode) -> None:
        """Called exactly once for every episode that was reset, also when it is aborted."""

    def shutdown(self) -> None:
        """Called when the rollout that used it is closed: frees what outlives episodes (processes, connections)."""


__all__ = ["Environment", "Episode", "Step", "Task"]
