"""Checks of one answer of an environment: types, numbers, texts, and how long it blocked."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Coroutine, Generator
from types import coroutine
from typing import Any

import numpy as np

from rlflow.environment import is_finite, step_problem


def answer_problem(step: Any) -> tuple[str, str] | None:
    """(kind, text) of the first fault of what `step` answered, those that a run puts up with
    included; None where there is none."""
    if problem := step_problem(step):
        return problem
    for name, value in step.metrics.items():
        if not isinstance(name, str) or not is_finite(value):
            return (
                "metric",
                f"metrics: expected names with finite numbers, found {name!r}: {value!r}",
            )
    if not isinstance(step.terminated, (bool, np.bool_)):
        return "terminated", f"terminated: expected True or False, found {step.terminated!r}"
    return None


def timed_method(method: Callable[..., Any], blocked: list[float]) -> Callable[..., Any]:
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
