"""Tasksets of verifiers v1 with tools, hooks or a runtime, played by a program of theirs.

Their harness asks the policy through the endpoint, as any agent does, and calls the tools; their
rollout scores what was played. Source: verifiers 0.4, `v1/agent.py` (`Agent.run`),
`v1/mcp/launch.py` (`serve_shared`), `v1/runtimes/base.py` (`prepare_uv_script`).
"""

from __future__ import annotations

import importlib
import os
import shutil
import sysconfig
from collections.abc import Sequence
from typing import Any

from rlflow.errors import ConfigError, MissingPackageError, described
from rlflow.types import Episode, Step, Task
from rlflow_environments.adapters.verifiers.tasksets import (
    METRICS,
    LoadedTaskset,
    VerifiersError,
    measured,
)
from rlflow_environments.endpoint import AgentSession, Endpoint
from rlflow_environments.program.agents import AgentEnvironment
from rlflow_environments.program.running import AgentTask


class VerifiersHarness(AgentEnvironment):
    """A taskset and the name of the harness that plays it, on this machine.

    The harness `bash` runs what the policy writes, with the rights of the run."""

    metrics = {**AgentEnvironment.metrics, **METRICS}

    def __init__(self, loaded: LoadedTaskset, harness: str, timeout_s: float) -> None:
        """Raises ConfigError, MissingPackageError."""
        super().__init__(plain=False, ignore=False, timeout_s=timeout_s)
        self._loaded, self._tools = loaded, {}
        path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ.get('PATH', '')}"
        if shutil.which("uv", path=path) is None:
            raise MissingPackageError(
                "environment verifiers: a taskset that is played by a harness needs uv: pip "
                "install uv"
            )
        try:
            self._config = loaded.v1.AgentConfig(
                harness={"id": harness, "env": {"PATH": path}},
                runtime=loaded.v1.SubprocessConfig(),
                model="policy",
            )
        except Exception as problem:  # noqa: BLE001 -- theirs may raise anything
            raise ConfigError(
                f"environment.harness: '{harness}' cannot be made: {described(problem)}"
            ) from None

    def tasks(self, split: str) -> Sequence[Task]:
        return self._loaded.ours(split)

    async def begin(self) -> Endpoint:
        """Starts the endpoint, and the tools that all tasks share."""
        endpoint = await super().begin()
        mcp, taskset = importlib.import_module("verifiers.v1.mcp"), self._loaded.taskset
        shared = mcp.serve_shared(type(taskset).toolsets(taskset.config))
        self._tools = await self.held.enter_async_context(shared)
        return endpoint

    async def start(self, task: Task, session: AgentSession, url: str) -> AgentTask:
        v1 = self._loaded.v1
        client = v1.EvalClientConfig(base_url=f"{url}/v1")
        agent = v1.Agent(self._config.model_copy(update={"client": client}))

        async def play(_: dict[str, Any], theirs: Any) -> dict[str, float]:
            trace = await agent.run(theirs, tools=self._tools)
            if not trace.ok:
                problem = trace.errors[-1]
                raise VerifiersError(f"{problem.type}: {problem.message}")
            return measured(trace)

        return AgentTask(play, {}, self._loaded.theirs(task))

    async def score(self, episode: Episode) -> float:
        played = episode.scratch["agent"].returned or {}  # nothing where a limit ended it
        return float(played.get("rubric", 0.0))

    async def step(self, episode: Episode, response: str) -> Step:
        step = await super().step(episode, response)
        step.metrics |= episode.scratch["agent"].returned or {}
        return step
