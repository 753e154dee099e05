"""What is asked of an environment outside of episodes: a failure of its is one line, and costs no more than it must."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rlflow.environment import Environment
from rlflow.errors import EnvironmentContractError, RLFlowError, described
from rlflow.types import Task

logger = logging.getLogger(__name__)


def tasks_of(environment: Environment, split: str) -> list[Task]:
    """The split's tasks. Raises EnvironmentContractError where they cannot be had, or are none."""
    with _contract(environment, "tasks", "a sequence of Task"):
        tasks = list(environment.tasks(split))
        for number, task in enumerate(tasks):
            if not isinstance(task, Task):
                raise TypeError(f"entry {number} is of type {type(task).__name__}")
            if not isinstance(task.id, str) or not isinstance(task.prompt, Sequence):
                raise TypeError(f"task {number}: its id must be text, its prompt text or a list of messages")
    return tasks


def reported(environment: Environment) -> dict[str, float]:
    """What the environment reports about the last collection. Raises EnvironmentContractError where it is no dict of numbers."""
    with _contract(environment, "report", "a dict of numbers"):
        report = {str(key): float(value) for key, value in environment.report().items()}
    return report


def shut_down(environment: Environment) -> None:
    """Lets the environment free what outlives episodes. One that cannot is a warning: the run that it belonged to has ended."""
    try:
        environment.shutdown()
    except KeyboardInterrupt:
        raise
    except BaseException as failure:  # noqa: BLE001 -- others' code, as at the episode boundary
        told = "%s.shutdown failed, what it started may still be running: %s"
        logger.warning(told, type(environment).__name__, described(failure))


@contextmanager
def _contract(environment: Environment, method: str, expected: str) -> Iterator[None]:
    """Whatever is raised within, but for an RLFlowError, as an EnvironmentContractError."""
    try:
        yield
    except (RLFlowError, KeyboardInterrupt):
        raise
    except BaseException as failure:
        raise EnvironmentContractError(
            f"{type(environment).__name__}.{method}: expected {expected}, found {described(failure)}. Fix it; RLFLOW_DEBUG=1 "
            "shows where."
        ) from failure
