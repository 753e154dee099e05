"""Any environment of gymnasium whose actions can be written: text, or a number of a discrete
space."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from rlflow.environment import Environment
from rlflow.errors import ConfigError, needing
from rlflow.report.metrics import Metric
from rlflow.types import Episode, Step, Task
from rlflow.values import PositiveInt
from rlflow_environments.adapters.text import beginning_with, formatted, seeded_tasks


class GymnasiumEnvironment(Environment):
    """id: as for `gymnasium.make`, options: its further keywords. prompt: what stands before the
    first observation; {actions} says what can be done. formatter: `file.py:function` of an
    observation, which gives its text. tasks_per_split: seeds of `reset`."""

    shorthand = "id"
    stop = ("\n",)
    metrics = {
        "finished": Metric(
            "share", "of episodes that the environment ended, its own time limit left out"
        ),
        "invalid_actions": Metric("per episode", "responses that were no action"),
    }

    def __init__(
        self,
        id: str,
        prompt: str = "Answer with one action per line. Actions: {actions}.\n",
        formatter: str | None = None,
        tasks_per_split: PositiveInt = 256,
        options: dict[str, Any] | None = None,
    ) -> None:
        with needing("environment gymnasium", "pip install gymnasium"):
            self._gymnasium = importlib.import_module("gymnasium")
        self._id, self._options, self._count = id, options or {}, tasks_per_split
        self._text = formatted(formatter, str)
        try:
            game = self._gymnasium.make(id, **self._options)
        except Exception as error:  # noqa: BLE001 -- gymnasium's errors share no other parent
            raise ConfigError(f"environment.id: gymnasium cannot make '{id}': {error}") from None
        space = game.action_space
        game.close()
        spaces = self._gymnasium.spaces
        if not isinstance(space, spaces.Text | spaces.Discrete):
            raise ConfigError(
                f"environment.id: '{id}' has actions of {space}; expected text, or numbers of a "
                "discrete space."
            )
        numbers = isinstance(space, spaces.Discrete)
        self._actions = f"{space.start} to {space.start + space.n - 1}" if numbers else "text"
        self._space, self._numbers, self._prompt = (
            space,
            numbers,
            prompt.replace("{actions}", self._actions),
        )

    def tasks(self, split: str) -> Sequence[Task]:
        return seeded_tasks(split, self._prompt, self._count)

    def reset(self, task: Task) -> Episode:
        """A game of its own per episode; its first observation ends the prompt."""
        game = self._gymnasium.make(self._id, **self._options)
        observation, _ = game.reset(seed=task.answer)
        return Episode(
            beginning_with(task, self._text(observation)), scratch={"game": game, "invalid": 0}
        )

    def step(self, episode: Episode, response: str) -> Step:
        said, state = response.strip(), episode.scratch
        action = (
            int(said) if self._numbers and said.lstrip("-").isdecimal() and len(said) < 10 else said
        )
        if not self._space.contains(action):
            state["invalid"] += 1
            metrics = {"finished": 0.0, "invalid_actions": float(state["invalid"])}
            return Step(f"Not an action; one of: {self._actions}.\n", metrics=metrics)
        observation, reward, ended, cut, _ = state["game"].step(action)
        metrics = {"finished": float(ended), "invalid_actions": float(state["invalid"])}
        return Step(f"{self._text(observation)}\n", float(reward), bool(ended or cut), metrics)

    def close(self, episode: Episode) -> None:
        episode.scratch["game"].close()
