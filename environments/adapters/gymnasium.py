"""Any environment of gymnasium whose actions can be written: text, a number of a discrete space,
JSON for several numbers or named parts, or whatever a reader of the user's own understands."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import Any

from rlflow.environment import Environment
from rlflow.errors import ConfigError, needing
from rlflow.report.metrics import Metric
from rlflow.types import Episode, Step, Task
from rlflow.values import PositiveInt
from rlflow_environments.adapters.actions import action_of, described, readable
from rlflow_environments.adapters.text import READER, beginning_with, formatted, seeded_tasks

logger = logging.getLogger(__name__)

NO_ACTION = (
    *(ValueError, TypeError, AttributeError, LookupError, ArithmeticError),
    RecursionError,
)
"""What a reader raises for a text that is no action: parts that are missing, numbers too large."""


class GymnasiumEnvironment(Environment):
    """id: as for `gymnasium.make`, options: its further keywords. prompt: what stands before the
    first observation; {actions} says what can be done. formatter: `file.py:function` of an
    observation, which gives its text. reader: `file.py:function` of a response, which gives the
    action; without it numbers, text and JSON are read. tasks_per_split: seeds of `reset`."""

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
        reader: str | None = None,
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
        self._space = game.action_space
        game.close()
        self._read = READER.resolve(reader, "environment.reader") if reader else None
        if self._read is None and not readable(self._space):
            raise ConfigError(
                f"environment.id: '{id}' has actions of {self._space}; expected text, numbers, or "
                "parts of these. Set environment.reader=file.py:function, which makes an action of "
                "a response."
            )
        self._actions = described(self._space)
        self._prompt = prompt.replace("{actions}", self._actions)
        self._look_at_seeds()

    def tasks(self, split: str) -> Sequence[Task]:
        return seeded_tasks(split, self._prompt, self._count)

    def reset(self, task: Task) -> Episode:
        """A game of its own per episode; its first observation ends the prompt."""
        game = self._gymnasium.make(self._id, **self._options)
        try:
            begun = beginning_with(task, self._text(game.reset(seed=task.answer)[0]))
        except BaseException:
            game.close()  # an episode that did not begin is not closed
            raise
        return Episode(begun, scratch={"game": game, "invalid": 0})

    def step(self, episode: Episode, response: str) -> Step:
        state = episode.scratch
        try:
            action = (self._read or self._plain)(response.strip())
            known = action is not None and self._space.contains(action)
        except NO_ACTION:
            known = False
        state["invalid"] += not known
        metrics = {"finished": 0.0, "invalid_actions": float(state["invalid"])}
        if not known:
            return Step(f"Not an action; one of: {self._actions}.\n", metrics=metrics)
        observation, reward, ended, cut, _ = state["game"].step(action)
        metrics["finished"] = float(ended)
        return Step(f"{self._text(observation)}\n", float(reward), bool(ended or cut), metrics)

    def close(self, episode: Episode) -> None:
        episode.scratch["game"].close()

    def _plain(self, said: str) -> Any:
        return action_of(self._space, said)

    def _look_at_seeds(self) -> None:
        """Says so where a seed gives another beginning each time: the attempts of a group would
        face other problems each."""
        shown = []
        for _ in range(2):
            game = self._gymnasium.make(self._id, **self._options)
            shown.append(self._text(game.reset(seed=0)[0]))
            game.close()
        if shown[0] != shown[1]:
            logger.warning(
                "environment.id: '%s' begins differently each time it is reset with the same seed: "
                "the attempts of a group face different problems, and no run can be repeated.",
                self._id,
            )
