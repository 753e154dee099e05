"""Reward functions of the user's own, called for one completion at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.components import Kind
from rlflow.errors import ConfigError, EnvironmentContractError, RLFlowError
from rlflow.types import Observation

REWARD = Kind("reward")
"""`def reward(prompt, completion, **row)`, or `def reward(prompts, completions, **columns)`."""
OURS = ("prompt", "completion", "prompts", "completions")
"""What a function is given besides the row's columns; a column of such a name stays out."""
ELSEWHERE = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""What other trainers give such a function, and this one does not."""
_FORMS = "reward(prompt, completion, **row) or reward(prompts, completions, **columns)"
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class NoVerdictError(RLFlowError):
    """No reward function judged a completion: its episode is left out, not scored 0."""


@dataclass(frozen=True)
class RewardFunction:
    """A function that judges completions.

    batched: it takes lists and returns one, as TRL's do. required: columns that a row must have.
    takes: columns that it can be given; None: all."""

    name: str
    function: Callable[..., Any]
    batched: bool
    required: frozenset[str]
    takes: frozenset[str] | None

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(inspect.unwrap(self.function))

    def missing(self, row: Mapping[str, Any]) -> list[str]:
        """Columns that the function needs and the row lacks."""
        return sorted(self.required - row.keys())

    def call(self, prompt: Observation, completion: str, row: Mapping[str, Any]) -> Any:
        """What the function returns, or an awaitable of it."""
        columns = {
            name: value
            for name, value in row.items()
            if name not in OURS and (self.takes is None or name in self.takes)
        }
        if not self.batched:
            given = {"prompt": prompt, "completion": completion}
            return self.function(**self._known(given), **columns)
        answered: Any = completion
        if not isinstance(prompt, str):
            answered = [{"role": "assistant", "content": completion}]
        lists = {"prompts": [prompt], "completions": [answered]}
        listed = {name: [value] for name, value in columns.items()}
        return self.function(**self._known(lists), **listed)

    def verdict(self, returned: Any) -> float | None:
        """The number in what the function returned; None where it gave none. Raises
        EnvironmentContractError for anything else."""
        if self.batched:
            if not isinstance(returned, Sequence) and not hasattr(returned, "__len__"):
                raise EnvironmentContractError(
                    f"environment.reward: {self.name} takes `completions`, so it must return a "
                    f"list of one number each; found {returned!r:.60}."
                )
            if len(returned) != 1:
                raise EnvironmentContractError(
                    f"environment.reward: {self.name} got 1 completion and returned "
                    f"{len(returned)} rewards; expected one each."
                )
            returned = returned[0]
        if returned is None:
            return None
        if isinstance(returned, str) or not hasattr(returned, "__float__"):
            raise EnvironmentContractError(
                f"environment.reward: {self.name} must return a number, or None for no verdict; "
                f"found {returned!r:.60}."
            )
        return float(returned)

    def _known(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Those of ours that the function takes."""
        return {
            name: value for name, value in given.items() if self.takes is None or name in self.takes
        }


def reward_function(reference: str) -> RewardFunction:
    """The function behind `file.py:name` or `package.module:name`. Raises ConfigError where it takes
    no completion, or what is not known here."""
    found = REWARD.resolve(reference, "environment.reward")
    name = reference.rpartition(":")[2]
    if isinstance(found, type) or not callable(found):
        raise ConfigError(
            f"environment.reward: {reference}: expected a function, {_FORMS}; found {found!r:.60}."
        )
    parameters = inspect.signature(found).parameters.values()
    names = {one.name for one in parameters if one.kind in _NAMED}
    open_ended = any(one.kind is one.VAR_KEYWORD for one in parameters)
    batched = "completions" in names
    if not batched and "completion" not in names:
        shown = ", ".join(one.name for one in parameters) or "nothing"
        raise ConfigError(
            f"environment.reward: {reference} takes {shown}; expected {_FORMS}: one completion, or "
            "lists as TRL's reward functions."
        )
    needed = {one.name for one in parameters if one.kind in _NAMED and one.default is one.empty}
    if elsewhere := sorted(needed & set(ELSEWHERE)):
        raise ConfigError(
            f"environment.reward: {reference} needs {', '.join(elsewhere)}, which is not given "
            "here; give the parameter a default, or leave it out."
        )
    required = frozenset(needed - set(OURS))
    return RewardFunction(name, found, batched, required, None if open_ended else frozenset(names))
