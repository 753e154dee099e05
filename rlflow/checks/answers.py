"""Checks of one answer of an environment: types, numbers, texts, and how long it blocked."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Coroutine, Generator, Mapping
from types import coroutine
from typing import Any

from rlflow.environment import MAX_REWARD
from rlflow.types import Step

EITHER_WAY = f"at most {MAX_REWARD:g} either way"


def step_problem(step: Any) -> tuple[str, str] | None:
    """(kind, text) of the first fault of what `step` answered; None where there is none."""
    if not isinstance(step, Step):
        hint = " (is an `await` or a `return` missing?)" if step is None else ""
        return (
            "step type",
            f"step: expected an rlflow.Step, found {type(step).__name__}{hint}",
        )
    if not _finite(step.reward):
        return (
            "reward",
            f"step: reward: expected a finite number, found {step.reward!r}",
        )
    if abs(step.reward) > MAX_REWARD:
        return "reward", f"step: reward: expected {EITHER_WAY}, found {step.reward!r}"
    for kind in ("rewards", "metrics"):
        if not isinstance(getattr(step, kind), Mapping):
            found = repr(getattr(step, kind))
            return kind, f"step: {kind}: expected {{name: number}}, found {found}"
    named = "expected names with finite numbers"
    for name, value in step.rewards.items():
        if not isinstance(name, str) or not _finite(value) or abs(value) > MAX_REWARD:
            return (
                "rewards",
                f"step: rewards: {named}, {EITHER_WAY}, found {name!r}: {value!r}",
            )
    for name, value in step.metrics.items():
        if not isinstance(name, str) or not _finite(value):
            return "metric", f"step: metrics: {named}, found {name!r}: {value!r}"
    if not isinstance(step.terminated, bool):
        return (
            "terminated",
            f"step: terminated: expected True or False, found {step.terminated!r}",
        )
    if problem := observation_problem(step.observation):
        return "observation", f"step: observation {problem}"
    return None


def observation_problem(observation: Any) -> str:
    """What is wrong with a prompt or observation, or ""."""
    if isinstance(observation, str):
        return ""
    if not isinstance(observation, list):
        return f"must be text or a list of messages, found {type(observation).__name__}"
    for message in observation:
        if not isinstance(message, dict) or not {"role", "content"} <= set(message):
            return f"has a message without role and content: {message!r}"
    return ""


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) < math.inf


def timed_method(
    method: Callable[..., Any], blocked: list[float]
) -> Callable[..., Any]:
    """The method; notes the longest time between two awaits of each async call, in seconds."""

    @coroutine
    def watched(running: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        longest, action = 0.0, running.send
        given: Any = None
        try:
            while True:
                began = time.monotonic()
                try:
                    asked = action(given)
                finally:
                    longest = max(longest, time.monotonic() - began)
                try:
                    action, given = running.send, (yield asked)
                except BaseException as thrown:  # noqa: BLE001 -- handed on, a cancellation too
                    action, given = running.throw, thrown
        except StopIteration as ended:
            return ended.value
        finally:
            blocked.append(longest)

    async def timed(*arguments: Any) -> Any:
        return await watched(method(*arguments))

    def plain(*arguments: Any) -> Any:
        answer = method(*arguments)
        return watched(answer) if inspect.iscoroutine(answer) else answer

    return timed if inspect.iscoroutinefunction(method) else plain
