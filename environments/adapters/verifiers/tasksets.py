"""Tasksets of verifiers v1: a prompt, one response, and the task's own rewards on it.

What goes on longer there is a program (a harness) that speaks to an endpoint with tokens of its
own, and is refused. Source: verifiers 0.4, `v1/task.py` (`Task.score`), `v1/rollout.py` (the trace
of a rollout), `v1/utils/loaders.py`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from itertools import islice
from typing import Any

from rlflow.environment import Environment
from rlflow.errors import ConfigError, described
from rlflow.types import Episode, Step, Task
from rlflow_environments.adapters.verifiers.shared import (
    METRICS,
    VerifiersError,
    as_message,
    split_rows,
)

MOST_TASKS = 100_000  # some tasksets never end


class VerifiersTaskset(Environment):
    """A taskset by the name of its package; options: of its configuration. Raises ConfigError."""

    max_turns = 1
    metrics = METRICS

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        v1 = self._v1 = importlib.import_module("verifiers.v1")
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        try:
            taskset = loaders.load_taskset(loaders.taskset_config_type(name)(id=name, **options))
            tasks = list(islice(taskset, MOST_TASKS))
            played_by = loaders.environment_class(name)
        except Exception as problem:  # noqa: BLE001 -- theirs may raise anything
            raise ConfigError(
                f"environment.environment: '{name}' cannot be made: {described(problem)} (a "
                "package with load_environment needs a verifiers before 0.4)"
            ) from None
        problem = (
            f"is played by a {played_by.__name__}" if played_by is not v1.SingleAgentEnv else ""
        )
        problem = problem or next(filter(None, (_unfit(v1, taskset, task) for task in tasks)), "")
        if problem:
            raise ConfigError(
                f"environment.environment: '{name}' {problem}; expected a task of one prompt and "
                "one response."
            )
        self._tasks = dict(zip(("train", "val"), split_rows(tasks), strict=True))

    def tasks(self, split: str) -> Sequence[Task]:
        return [
            Task(
                f"{split}-{number}",
                [as_message(message) for message in _prompt(self._v1, task)],
                getattr(task.data, "answer", None),
                {"split": split, "number": number},
            )
            for number, task in enumerate(self._tasks[split])
        ]

    async def step(self, episode: Episode, response: str) -> Step:
        where = episode.task.metadata
        task, v1 = self._tasks[where["split"]][where["number"]], self._v1
        messages = [*_prompt(v1, task), v1.AssistantMessage(content=response)]
        nodes = [
            v1.MessageNode(
                parent=number - 1 if number else None,
                message=message,
                sampled=number == len(messages) - 1,
            )
            for number, message in enumerate(messages)
        ]
        told = v1.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        trace = v1.Trace(task=told, agent=v1.AgentInfo(config=v1.AgentConfig()), nodes=nodes)
        trace.stop("agent_completed")
        try:
            await task.score(trace)
        except v1.TaskError as problem:
            raise VerifiersError(f"the task's own scoring failed: {described(problem)}") from None
        metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
        return Step(
            reward=trace.reward, terminated=True, metrics={**metrics, "rubric": trace.reward}
        )


def _prompt(v1: Any, task: Any) -> list[Any]:
    """The messages that the policy sees."""
    system, prompt = task.data.system_prompt, task.data.prompt
    told = [v1.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or ())
    return [*([v1.SystemMessage(content=system)] if system else []), *told]


def _unfit(v1: Any, taskset: Any, task: Any) -> str:
    """Why a task needs more than one response; "" where it does not."""
    theirs = type(task)
    if theirs.toolsets(task.config) or type(taskset).toolsets(taskset.config):
        return "has tools, which only its harness calls"
    if theirs.NEEDS_CONTAINER or task.data.image:
        return "needs a container"
    if theirs.setup is not v1.Task.setup or theirs.finalize is not v1.Task.finalize:
        return "prepares a runtime (setup, finalize)"
    needing = [
        hook.__name__
        for kind in ("reward", "metric")
        for hook in task.hooks(kind)
        if _needs_runtime(hook)
    ]
    if needing:
        return f"scores in a runtime ({', '.join(needing)})"
    return "" if task.data.prompt else "has no prompt: another agent opens it"


def _needs_runtime(hook: Any) -> bool:
    """As `Task.score` decides what to leave out without one."""
    parameter = inspect.signature(hook).parameters.get("runtime")
    return parameter is not None and parameter.default is parameter.empty
