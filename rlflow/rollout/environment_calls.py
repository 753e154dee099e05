"""Calls into an environment outside episodes: each has a deadline and a word meanwhile; failures
become one-line errors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from rlflow.environment import Environment
from rlflow.errors import EnvironmentContractError, RLFlowError, RolloutError, described
from rlflow.net.calls import start_call
from rlflow.rollout.episodes import CALL_S
from rlflow.texts import wrong_name
from rlflow.types import Task

logger = logging.getLogger(__name__)
T = TypeVar("T")

MOST_TASKS = 1_000_000
"""Of a split that does not say how many it has (a generator, which may have no end)."""
LONGEST_ID = 1_000  # characters
FIRST_WORD_S = 10.0
SHUTDOWN_S = 60.0
"""By which a run that is over no longer waits for its environment."""


def tasks_of(environment: Environment, split: str, limit_s: float = CALL_S) -> list[Task]:
    """The split's tasks. Raises EnvironmentContractError where they cannot be had in time, or are
    none, or share an id."""
    name = f"{type(environment).__name__}.tasks"

    def read() -> list[Task]:
        tasks = environment.tasks(split)
        found = list(islice(tasks, len(tasks) if isinstance(tasks, Sized) else MOST_TASKS + 1))
        if len(found) > MOST_TASKS and not isinstance(tasks, Sized):
            raise TypeError(f"a {type(tasks).__name__} with no end after {MOST_TASKS:,} tasks")
        return found

    with _contract(environment, "tasks", "a sequence of Task"):
        tasks = _in_time(read, limit_s, f"{name}('{split}')")
        for number, task in enumerate(tasks):
            if not isinstance(task, Task):
                raise TypeError(f"entry {number} is of type {type(task).__name__}")
            if not isinstance(task.id, str) or not isinstance(task.prompt, Sequence):
                raise TypeError(
                    f"task {number}: its id must be text, its prompt text or a list of messages"
                )
            if len(task.id) > LONGEST_ID:
                raise ValueError(f"task {number}: an id of {len(task.id):,} characters")
    if repeated := repeated_id(tasks):
        raise EnvironmentContractError(f"{name}('{split}'): {repeated}")
    return tasks


def repeated_id(tasks: Sequence[Task]) -> str:
    """What is wrong with the first id that two tasks have; "" where each has its own."""
    places: dict[str, int] = {}
    for number, task in enumerate(tasks):
        first = places.setdefault(task.id, number)
        if first != number:
            return (
                f"tasks {first} and {number} have the same id '{task.id:.60}'; seeds, groups and "
                "what a resumed run remembers go by it: give each task an id of its own."
            )
    return ""


def reported(environment: Environment, limit_s: float = CALL_S) -> dict[str, float]:
    """What the environment reports about the last collection. Raises EnvironmentContractError where
    it is no dict of numbers, or takes too long."""
    with _contract(environment, "report", "a dict of numbers"):
        told = _in_time(environment.report, limit_s, f"{type(environment).__name__}.report")
        report = {str(key): float(value) for key, value in told.items()}
        if problem := wrong_name(report):
            raise ValueError(problem)
    return report


def shut_down(environment: Environment, limit_s: float = SHUTDOWN_S) -> None:
    """Lets the environment free what outlives episodes. One that cannot, or not in time, is a
    warning: the run that it belonged to has ended."""
    name = type(environment).__name__
    try:
        _in_time(environment.shutdown, limit_s, f"{name}.shutdown")
    except KeyboardInterrupt:
        raise
    except BaseException as failure:  # noqa: BLE001 -- others' code, as at the episode boundary
        told = "%s.shutdown failed, what it started may still be running: %s"
        logger.warning(told, name, described(failure))


def _in_time(function: Callable[[], T], limit_s: float, what: str) -> T:
    """The function's result, out of a thread that cannot keep the process from ending. Raises
    RolloutError after limit_s."""
    answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
    start_call(function, lambda result, error: answers.put((result, error)), what)
    waited_s = 0.0  # counted in waits, so that a process that was suspended is not blamed
    while True:
        wait_s = min(max(FIRST_WORD_S, waited_s), limit_s - waited_s)
        try:
            result, error = answers.get(timeout=wait_s)
            break
        except Empty:
            waited_s += wait_s
        if waited_s >= limit_s:
            raise RolloutError(
                f"{what} did not end within {limit_s:g} s (rollout.faults.call_s at most)"
            )
        logger.warning("waiting for %s, %.0f s of %g s", what, waited_s, limit_s)
    if error is not None:
        raise error
    return result


@contextmanager
def _contract(environment: Environment, method: str, expected: str) -> Iterator[None]:
    """Whatever is raised within, but for an RLFlowError, as an EnvironmentContractError."""
    try:
        yield
    except (RLFlowError, KeyboardInterrupt):
        raise
    except BaseException as failure:
        raise EnvironmentContractError(
            f"{type(environment).__name__}.{method}: expected {expected}, found "
            f"{described(failure)}. Fix it; RLFLOW_DEBUG=1 shows where."
        ) from failure
