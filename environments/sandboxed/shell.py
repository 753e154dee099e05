"""Tasks for a shell: a policy works in a sandbox of its own with `bash` and files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlflow.errors import DataError
from rlflow.report.metrics import Metric
from rlflow.types import Episode, Message, Task
from rlflow.values import Component, PositiveInt
from rlflow_environments.common.tool_calls import TextCall
from rlflow_environments.sandbox import Limits, Sandbox, make_confines
from rlflow_environments.sandbox.bubblewrap import Confinement
from rlflow_environments.sandboxed.tools import BoxTools
from rlflow_environments.tool_use.environment import TOOL_METRICS, RuleScore, ToolEnvironment
from rlflow_environments.tool_use.rows import FORMERLY, make_rule, read_tasks

SHELL_METRICS = {
    **TOOL_METRICS,
    "reward": Metric("points", "what the rule or the check gives", score=True),
    "limits_reached": Metric("per episode", "programs that a limit ended"),
    "program_s": Metric("s", "of its programs, from start to end"),
}


class ShellTasks(ToolEnvironment):
    """Rows of tasks with `files` ({name: text}), which are there at the start, and a `check`, a
    script of bash that runs in the sandbox after the episode: the reward is 1 where it exits with
    0, else 0. It stands in the policy's folder, with a HOME of its own."""

    shorthand = "train"
    formerly = FORMERLY
    metrics = SHELL_METRICS

    def __init__(
        self,
        train: str,
        val: str | None = None,
        reward: Component | None = None,
        *,
        system: str | None = None,
        tools: Sequence[str] = ("bash", "read_file", "write_file"),
        limits: dict[str, Any] | None = None,
        confinement: Confinement = "bubblewrap",
        at_once: PositiveInt | None = None,
    ) -> None:
        """train, val: JSON Lines of tasks. reward: a rule of their last response in place of
        the check. system: a message before each prompt. tools: of bash, python, read_file and
        write_file. limits: of each program. at_once: programs that run at the same time; none: two
        per processor. Raises ConfigError, DataError, SandboxError."""
        defaults = Limits(timeout_s=30.0, memory_mb=512)
        self._confines = make_confines(limits, defaults, confinement)
        self._rule = make_rule(reward) if reward else None
        matched = bool(reward) and reward["name"] == "match"
        needed = ["answer"] if matched else [] if reward else ["check"]
        self._tasks = read_tasks(train, val, needed, system)
        for task in (task for tasks in self._tasks.values() for task in tasks):
            files, check = task.metadata.get("files", {}), task.metadata.get("check", "")
            if not isinstance(check, str) or not _is_files(files):
                raise DataError(
                    f"{train}: task '{task.id}': expected 'files' as {{name: text}} and 'check' as "
                    "a script."
                )
        self._box_tools = BoxTools(tools, at_once)
        self.tools = self._box_tools.schemas

    @classmethod
    def evaluation_options(cls, path: str) -> dict[str, Any]:
        return {"val": path}

    async def reset(self, task: Task) -> Episode:
        async with self._box_tools.places.here():
            box = Sandbox(self._confines)
            await box.open()
            if files := task.metadata.get("files"):
                result = await box.run(["true"], files=files)
                if not result.succeeded:
                    await box.close()
                    told = " ".join(result.told(200).split())
                    raise DataError(f"task '{task.id}': its files: {told}")
        return Episode(task, scratch={"box": box, "limits_reached": 0.0, "program_s": 0.0})

    async def call(self, episode: Episode, call: TextCall) -> str:
        state = episode.scratch
        text, result = await self._box_tools.call(state["box"], call)
        state["limits_reached"] += bool(result.limit)
        state["program_s"] += result.duration_s
        return text

    async def score(self, episode: Episode, messages: Sequence[Message]) -> RuleScore:
        state, reward = episode.scratch, 0.0
        if self._rule is not None:
            reward = await self._rule(episode.task, messages)
        elif not state["box"].ended:
            async with self._box_tools.places.here():
                result = await state["box"].check(episode.task.metadata["check"])
            reward = float(result.succeeded)
        counts = {name: state[name] for name in ("limits_reached", "program_s")}
        return RuleScore(reward, {}, {"reward": reward, **counts})

    async def close(self, episode: Episode) -> None:
        await episode.scratch["box"].close()


def _is_files(files: Any) -> bool:
    return isinstance(files, dict) and all(isinstance(text, str) for text in files.values())
