"""Task folders of Harbor (Terminal-Bench 2) that need no image, played in a sandbox."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlflow.errors import RLFlowError
from rlflow.report.metrics import Metric
from rlflow.texts import wrong_name
from rlflow.types import Episode, Message, Task
from rlflow.values import PositiveFloat, PositiveInt
from rlflow_environments.common.jsonl import held_out
from rlflow_environments.common.tool_calls import TextCall
from rlflow_environments.sandbox import Limits, Sandbox, make_confines
from rlflow_environments.sandboxed.folders import (
    TESTS,
    Files,
    TaskFolder,
    entering,
    files_of_tests,
    packed,
    read_folders,
)
from rlflow_environments.sandboxed.shell import SHELL_METRICS
from rlflow_environments.sandboxed.tools import BoxTools
from rlflow_environments.tool_use.environment import RuleScore, ToolEnvironment, as_messages

REWARDS = "/logs/verifier"
EMPTY = f"find {TESTS} -mindepth 1 -delete; rm -rf {REWARDS}; mkdir -p {REWARDS}\n"
SYSTEM = (
    "You work in a shell on Linux, with the tools. Processes end with their command, files stay. "
    "When the task is done, answer without a tool call."
)


class HarborError(RLFlowError):
    """The task's own setup or tests failed by no fault of the policy: the episode is aborted."""


class HarborTasks(ToolEnvironment):
    """The tests of a folder see what the policy left behind, and write the reward to
    /logs/verifier/reward.json or reward.txt. Tests that a limit ends give 0; so do tests that write
    no reward, where they write one of the untouched task: the policy broke them. Where they never
    do, the episode is aborted. Several rewards are named ones; the reward is `reward`, else their
    mean."""

    shorthand = "train"
    formerly = {"folder": "train", "val_folder": "val"}
    metrics = {
        **SHELL_METRICS,
        "tests_killed": Metric(
            "share", "of episodes whose tests a limit ended, or the policy broke or kept out"
        ),
        "out_of_time": Metric("share", "of episodes that used up the time of the task"),
    }

    def __init__(
        self,
        train: str,
        val: str | None = None,
        *,
        tests: str | None = None,
        installed: bool = False,
        system: str = SYSTEM,
        tools: Sequence[str] = ("bash", "read_file", "write_file"),
        command_s: PositiveFloat = 60.0,
        limits: dict[str, Any] | None = None,
        at_once: PositiveInt | None = None,
    ) -> None:
        """train, val: a task's folder, or one that holds some. tests: a command in place of
        tests/test.sh, whose reward is 1 where it exits with 0. installed: what Dockerfiles install
        is on this machine. system: a message before each instruction. tools: of bash, python,
        read_file and write_file. command_s: of one call. limits: of each program. at_once: programs
        that run at the same time; none: two per processor. Raises ConfigError, DataError,
        SandboxError."""
        defaults = Limits(memory_mb=1024, disk_mb=128, processes=64)
        self._confines = make_confines(limits, defaults)
        self._tests, self._command_s = tests, command_s
        given = [train] if val is None else [train, val]
        found = [read_folders(path, installed, tests is None) for path in given]
        self._folders = {str(one.path): one for folders in found for one in folders}
        training, *rest = [[_task(one, system) for one in folders] for folders in found]
        self._tasks = {"train": training, "val": rest[0]} if rest else held_out(training)
        self._tests_work: dict[str, bool] = {}  # of the untouched task, by its folder
        self._box_tools = BoxTools(tools, at_once)
        self.tools = self._box_tools.schemas

    @classmethod
    def evaluation_options(cls, path: str) -> dict[str, Any]:
        return {"val": path}

    async def reset(self, task: Task) -> Episode:
        folder = self._folders[task.metadata["folder"]]
        async with self._box_tools.places.here():
            box = await self._laid_out(folder)
        counts = {"limits_reached": 0.0, "program_s": 0.0}
        return Episode(task, scratch={"box": box, "folder": folder, **counts})

    async def _laid_out(self, folder: TaskFolder) -> Sandbox:
        """A sandbox with the task in it. Raises HarborError, SandboxError."""
        box = Sandbox(dataclasses.replace(self._confines, places=folder.places))
        await box.open()
        try:
            for where, script, files in folder.layers:
                await _lay(box, where, script, files, folder.tests_s)
            made = f"mkdir -p {shlex.quote(folder.workdir)}"
            await _lay(box, "its working folder", made, [])
        except BaseException:
            await box.close()
            raise
        return box

    async def call(self, episode: Episode, call: TextCall) -> str:
        state, folder = episode.scratch, episode.scratch["folder"]
        left_s = min(self._command_s, max(0.1, folder.agent_s - state["program_s"]))
        # A path of a file tool is seen from the working folder, as a shell's is
        if "path" in call.arguments:
            path = Path(folder.workdir, str(call.arguments["path"]))
            call = TextCall(call.name, {**call.arguments, "path": str(path)})
        start = entering(folder.workdir, folder.variables)
        text, result = await self._box_tools.call(state["box"], call, left_s, start)
        state["limits_reached"] += bool(result.limit)
        state["program_s"] += result.duration_s
        return text

    def is_over(self, episode: Episode) -> bool:
        state = episode.scratch
        return bool(state["box"].ended or state["program_s"] >= state["folder"].agent_s)

    async def score(self, episode: Episode, messages: Sequence[Message]) -> RuleScore:
        state, folder = episode.scratch, episode.scratch["folder"]
        late = float(state["program_s"] >= folder.agent_s)
        counts = {name: state[name] for name in ("limits_reached", "program_s")}
        rewards, killed = {"reward": 0.0}, 0.0
        if not state["box"].ended:
            async with self._box_tools.places.here():
                rewards, killed = await self._tested(state["box"], folder)
        reward = rewards.get("reward", math.fsum(rewards.values()) / max(1, len(rewards)))
        metrics = {"reward": reward, "tests_killed": killed, "out_of_time": late, **counts}
        return RuleScore(reward, rewards if len(rewards) > 1 else {}, metrics)

    async def close(self, episode: Episode) -> None:
        await episode.scratch["box"].close()

    async def _tested(self, box: Sandbox, folder: TaskFolder) -> tuple[dict[str, float], float]:
        """(rewards by name, 1 where a limit ended the tests, or the policy broke them)."""
        try:
            return await self._rewarded(box, folder)
        except HarborError:
            if await self._works_untouched(folder):
                return {"reward": 0.0}, 1.0
            raise

    async def _works_untouched(self, folder: TaskFolder) -> bool:
        """Whether the tests write a reward where no policy has been."""
        key = str(folder.path)
        if key not in self._tests_work:
            box = await self._laid_out(folder)
            try:
                await self._rewarded(box, folder)
                self._tests_work[key] = True
            except HarborError:
                self._tests_work[key] = False
            finally:
                await box.close()
        return self._tests_work[key]

    async def _rewarded(self, box: Sandbox, folder: TaskFolder) -> tuple[dict[str, float], float]:
        """(rewards by name, 1 where a limit ended the tests). Raises HarborError without any."""
        try:
            await _lay(box, "its tests", EMPTY, files_of_tests(folder))
        except HarborError:  # the policy stands in their way: setup was fine, in the same sandbox
            return {"reward": 0.0}, 1.0
        variables = {**folder.variables, **folder.tests_variables}
        script = entering(folder.workdir, variables) + (self._tests or f"bash {TESTS}/test.sh")
        result = await box.check(f"{script}\n", folder.tests_s)
        if result.limit or box.ended:
            return {"reward": 0.0}, 1.0
        if self._tests:
            return {"reward": float(result.succeeded)}, 0.0
        for name in ("reward.json", "reward.txt"):
            written = await box.run(["cat", f"{REWARDS}/{name}"])
            if written.succeeded:
                return _rewards(written.stdout, f"{folder.path}: {REWARDS}/{name}"), 0.0
        raise HarborError(f"{folder.path}: its tests wrote no reward: {result.told(500)}")


def _task(folder: TaskFolder, system: str) -> Task:
    prompt = as_messages(folder.instruction, system)
    return Task(folder.name, prompt, metadata={"folder": str(folder.path)})


async def _lay(
    box: Sandbox,
    where: str,
    before: str,
    files: Files,
    limit_s: float | None = None,
) -> None:
    """Runs a script in a sandbox and puts files there. Raises HarborError."""
    result = await box.bash(before, limit_s)
    if result.succeeded and files:
        result = await box.run(["tar", "-xf", "-", "-C", "/"], packed(files))
    if not result.succeeded:
        raise HarborError(f"{where}: {result.told(500)}")


def _rewards(text: str, where: str) -> dict[str, float]:
    """As Harbor reads them: a number, or an object of numbers. Raises HarborError."""
    try:
        found = json.loads(text)
        named = found if isinstance(found, dict) and found else {"reward": found}
        rewards = {str(name): float(value) for name, value in named.items()}
        if all(map(math.isfinite, rewards.values())) and not wrong_name(rewards):
            return rewards
    except (ValueError, TypeError, RecursionError):
        pass
    raise HarborError(f"{where}: expected a reward, found {text[:100]!r}.")
