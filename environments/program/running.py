"""An agent that runs: a process of its own, or a task of this one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from rlflow.errors import PolicyError, RLFlowError, described, raised_at
from rlflow.storage.child import Child, tail
from rlflow.storage.guard import marked

LAST_LINES, LINE = 5, 200
OURS = f"{Path(__file__).parent}{os.sep}"
MARK = "RLFLOW_EPISODE"
BLAMES_POLICY = os.EX_DATAERR
"""Exit code 65, with which a program says that what the policy wrote is at fault."""


class ProgramError(RLFlowError):
    """An agent failed: no fault of the policy's, as far as can be told."""


class AgentProcess:
    """A command as an agent. It gets its task as a file of JSON, and ends with its whole process
    group and all that keeps its mark in the environment.

    ended: done when the agent is. failure: how it failed, "" where it ended well. fault: that of
    the policy, where the agent says so."""

    ended: asyncio.Future[None]
    failure, returned = "", None
    fault: PolicyError | None = None

    def __init__(
        self, name: str, command: str, task: Mapping[str, Any], variables: Mapping[str, str]
    ) -> None:
        self._mark = f"{MARK}={variables[MARK]}"
        self._folder = Path(tempfile.mkdtemp(prefix="rlflow-agent-"))
        file = self._folder / "task.json"
        file.write_text(json.dumps(task), encoding="utf-8")
        self.variables = {**os.environ, **variables, "RLFLOW_TASK": str(file)}
        self._name = name
        try:
            self._child = self._started(command, "output.log")
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    @classmethod
    async def start(cls, *arguments: Any) -> AgentProcess:
        """Raises ProgramError."""
        running = await asyncio.to_thread(cls, *arguments)
        running.ended = asyncio.ensure_future(running._waited())
        return running

    async def _waited(self) -> None:
        await asyncio.shield(asyncio.wrap_future(self._child.ended))
        code = self._child.ended.result()
        if code == BLAMES_POLICY:
            self.fault = PolicyError(f"the agent ended with code {code}: {self.last_lines()}")
        elif code != 0:
            self.failure = f"{self._child.how_it_ended().partition(':')[0]}: {self.last_lines()}"

    @property
    def output(self) -> str:
        return tail(self._child.log)

    def last_lines(self) -> str:
        """How its output ends."""
        return last_lines(self.output)

    async def judge(self, command: str, limit_s: float) -> tuple[int, str, str]:
        """(exit code, what it wrote to stdout, and to stderr) of a command that looks at what the agent has done.
        Raises ProgramError where it takes longer."""
        errors = self._folder / "reward.errors"
        child = await asyncio.to_thread(self._started, command, "reward.log", errors)
        try:
            async with asyncio.timeout(limit_s):
                code = await asyncio.shield(asyncio.wrap_future(child.ended))
        except TimeoutError:
            raise ProgramError(
                f"environment.reward_command did not end within {limit_s:g} s: "
                f"{last_lines(tail(child.log) + tail(errors))}"
            ) from None
        finally:
            await asyncio.to_thread(child.stop, 0)
        return code, tail(child.log), tail(errors)

    async def stop(self) -> None:
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        self._child.stop(0)
        for _ in range(3):  # some may have started others in the meantime
            left = [pid for pid in marked(self._mark) if pid != os.getpid()]
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            if not left:
                break
        shutil.rmtree(self._folder, ignore_errors=True)

    def _started(self, command: str, log: str, errors: Path | None = None) -> Child:
        return Child(
            self._name, shlex.split(command), self._folder / log, variables=self.variables,
            errors=errors, error=ProgramError,
        )  # fmt: skip


class AgentTask:
    """An async function as an agent, in this process. returned: what it returned. fault: the
    PolicyError that it raised."""

    failure, output, returned = "", "", None
    fault: PolicyError | None = None

    def __init__(
        self, function: Callable[..., Awaitable[Any]], task: Mapping[str, Any], client: Any
    ) -> None:
        self._function = function
        self.ended = asyncio.ensure_future(self._run(dict(task), client))

    async def _run(self, task: dict[str, Any], client: Any) -> None:
        try:
            self.returned = await self._function(task, client)
            self.output = "" if self.returned is None else str(self.returned)
        except PolicyError as fault:
            self.fault = fault
        except BaseException as problem:  # noqa: BLE001 -- SystemExit would end the loop
            # A cancellation too: after one from outside nobody reads this
            self.failure = f"{described(problem)} ({raised_at(problem, OURS)})"

    def last_lines(self) -> str:
        return last_lines(self.output)

    async def stop(self) -> None:
        self.ended.cancel()
        await asyncio.wait({self.ended}, timeout=1.0)


def last_lines(text: str) -> str:
    """How a text ends, in one line."""
    lines = [line.strip()[:LINE] for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-LAST_LINES:]) or "it wrote nothing"
