"""Tasksets of verifiers v1: a prompt, one response, and the task's own rewards on it.

What goes on longer there is a program: `harness.py`. Source: verifiers 0.4, `v1/task.py`
(`Task.score`), `v1/rollout.py` (the trace of a rollout), `v1/utils/loaders.py`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rlflow.environment import Environment
from rlflow.errors import ConfigError, RLFlowError, described
from rlflow.report.metrics import Metric
from rlflow.types import Episode, Step, Task

MOST_TASKS = 100_000  # some tasksets never end
HELD_OUT = 10  # every tenth task is for validation
METRICS = {"rubric": Metric("points", "what the taskset's rewards give, weighted", score=True)}


class VerifiersError(RLFlowError):
    """A task holds what cannot be written into one conversation, or failed: the episode is
    aborted."""


@dataclass(frozen=True)
class LoadedTaskset:
    """A taskset by the name of its package. tasks: theirs, by split."""

    v1: Any
    taskset: Any
    tasks: dict[str, list[Any]]

    @classmethod
    def load(cls, name: str, options: dict[str, Any]) -> LoadedTaskset:
        """options: of its configuration. Raises ConfigError."""
        v1 = importlib.import_module("verifiers.v1")
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        try:
            taskset = loaders.load_taskset(loaders.taskset_config_type(name)(id=name, **options))
            tasks = list(islice(taskset, MOST_TASKS))
            played_by = loaders.environment_class(name)
        except Exception as problem:  # noqa: BLE001 -- theirs may raise anything
            raise ConfigError(
                f"environment.environment: '{name}' cannot be made: {described(problem)} (expected a "
                "taskset of verifiers 0.4 or later)"
            ) from None
        if played_by is not v1.SingleAgentEnv:
            raise ConfigError(
                f"environment.environment: '{name}' is played by a {played_by.__name__}; expected "
                "a taskset for one agent."
            )
        for problem in filter(None, map(_refused, tasks)):
            raise ConfigError(f"environment.environment: '{name}': a task {problem}.")
        training = [task for number, task in enumerate(tasks) if number % HELD_OUT]
        return cls(v1, taskset, {"train": training, "val": tasks[::HELD_OUT]})

    def needs_harness(self) -> bool:
        """Whether a task takes more than a prompt and one response."""
        shared = type(self.taskset).toolsets(self.taskset.config)
        tasks = (task for own in self.tasks.values() for task in own)
        return bool(shared) or any(_needs_harness(self.v1, task) for task in tasks)

    def theirs(self, task: Task) -> Any:
        """The task as they have it."""
        return self.tasks[task.metadata["split"]][task.metadata["number"]]

    def ours(self, split: str) -> Sequence[Task]:
        """The tasks of a split."""
        return [
            Task(
                f"{split}-{number}",
                [_as_message(message) for message in _prompt(self.v1, task)],
                getattr(task.data, "answer", None),
                {"split": split, "number": number},
            )
            for number, task in enumerate(self.tasks[split])
        ]


class VerifiersTaskset(Environment):
    """A taskset whose tasks are a prompt and one response, scored in this process."""

    max_turns = 1
    metrics = METRICS

    def __init__(self, loaded: LoadedTaskset) -> None:
        self._loaded = loaded

    def tasks(self, split: str) -> Sequence[Task]:
        return self._loaded.ours(split)

    async def step(self, episode: Episode, response: str) -> Step:
        task, v1 = self._loaded.theirs(episode.task), self._loaded.v1
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
        return Step(reward=trace.reward, terminated=True, metrics=measured(trace))


def measured(trace: Any) -> dict[str, float]:
    """The metrics of a trace that was scored, and its reward."""
    told = {name: float(value) for name, value in trace.metrics.items() if value is not None}
    return {**told, "rubric": trace.reward}


def _prompt(v1: Any, task: Any) -> list[Any]:
    """The messages that the policy sees."""
    system, prompt = task.data.system_prompt, task.data.prompt
    told = [v1.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or ())
    return [*([v1.SystemMessage(content=system)] if system else []), *told]


def _as_message(message: Any) -> dict[str, str]:
    """A message of theirs for the policy's chat template. Raises VerifiersError for what is not
    text."""
    content = message.content
    if isinstance(content, list) and all(part.type == "text" for part in content):
        content = "".join(part.text for part in content)
    if not isinstance(content, str) or getattr(message, "tool_calls", None):
        raise VerifiersError(f"expected chat messages of text, found {str(message)[:200]}.")
    return {"role": message.role, "content": content}


def _refused(task: Any) -> str:
    """Why nobody plays a task here; "" where somebody does."""
    if type(task).NEEDS_CONTAINER or task.data.image:
        return "needs a container; expected tasks that are played on this machine"
    return "" if task.data.prompt else "has no prompt, as another agent opens it; expected one"


def _needs_harness(v1: Any, task: Any) -> bool:
    """Whether a task has tools, prepares a runtime, or is scored in one."""
    theirs = type(task)
    prepares = theirs.setup is not v1.Task.setup or theirs.finalize is not v1.Task.finalize
    hooks = (hook for kind in ("reward", "metric") for hook in task.hooks(kind))
    return prepares or bool(theirs.toolsets(task.config)) or any(map(_needs_runtime, hooks))


def _needs_runtime(hook: Any) -> bool:
    """As `Task.score` decides what to leave out without one."""
    parameter = inspect.signature(hook).parameters.get("runtime")
    return parameter is not None and parameter.default is parameter.empty
