"""The tools of an MCP server, for tasks of one's own."""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlflow.errors import ConfigError, needing
from rlflow.report.metrics import Metric
from rlflow.types import Episode, Message, Task
from rlflow.values import Component, PositiveFloat, PositiveInt
from rlflow_environments.adapters.mcp.session import MARK, McpError, McpSession, Server
from rlflow_environments.adapters.text import bearer
from rlflow_environments.common.choices import chosen
from rlflow_environments.common.threads import EpisodePlaces
from rlflow_environments.common.tool_calls import TextCall, tool_schema
from rlflow_environments.tool_use.environment import TOOL_METRICS, RuleScore, ToolEnvironment
from rlflow_environments.tool_use.rows import FORMERLY, make_rule, read_tasks

INHERITED = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER", "VIRTUAL_ENV")


class McpTools(ToolEnvironment):
    """Every episode has a session of its own: a program that is started for it, or a session of a
    server over HTTP. A server that fails, dies or never answers aborts the episode."""

    shorthand = "server"
    formerly = FORMERLY
    metrics = {**TOOL_METRICS, "reward": Metric("points", "what the rule gives", score=True)}

    def __init__(
        self,
        server: str,
        train: str,
        val: str | None = None,
        reward: Component | None = None,
        *,
        system: str | None = None,
        only: Sequence[str] = (),
        variables: Sequence[str] = (),
        api_key_variable: str | None = None,
        timeout_s: PositiveFloat = 60.0,
        start_s: PositiveFloat = 120.0,
        at_once: PositiveInt | None = None,
    ) -> None:
        """server: the address of a server over HTTP (http://localhost:8000/mcp), or the command of
        a program. train, val: JSON Lines of tasks. reward: the rule of their episodes (none:
        `match`). system: a message before each prompt. only: the tools that are offered (none:
        all). variables: names of environment variables that the program gets. api_key_variable:
        that of a bearer token.
        timeout_s: of a call. start_s: until a session is there. at_once: programs that start at
        the same time; none: two per processor. Raises ConfigError, DataError,
        MissingPackageError."""
        with needing("environment mcp", "pip install 'mcp>=2'"):
            import mcp
        if not hasattr(mcp, "Client"):
            raise ConfigError("environment mcp: expected mcp 2 or newer: pip install 'mcp>=2'.")
        self._server = _server(server, variables, api_key_variable, timeout_s, start_s)
        self._rule = make_rule(reward or "match")
        needed = [] if reward and reward["name"] != "match" else ["answer"]
        self._tasks = read_tasks(train, val, needed, system)
        self._places = EpisodePlaces(at_once)
        self._guard = self._server.guard()
        self.tools = _offered(_without_loop(_schemas(self._server)), only)

    @classmethod
    def evaluation_options(cls, path: str) -> dict[str, Any]:
        return {"val": path}

    async def reset(self, task: Task) -> Episode:
        self._guard = self._guard or self._server.guard()
        async with self._places.here():
            return Episode(task, scratch={"session": await McpSession(self._server).open()})

    async def call(self, episode: Episode, call: TextCall) -> str:
        return await episode.scratch["session"].call(call.name, call.arguments)

    async def score(self, episode: Episode, messages: Sequence[Message]) -> RuleScore:
        reward = await self._rule(episode.task, messages)
        return RuleScore(reward, {}, {"reward": reward})

    async def close(self, episode: Episode) -> None:
        await episode.scratch["session"].close()

    def shutdown(self) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.close()


def _server(
    server: str,
    variables: Sequence[str],
    api_key_variable: str | None,
    timeout_s: float,
    start_s: float,
) -> Server:
    over_http = server.startswith(("http://", "https://"))
    try:
        command = () if over_http else tuple(shlex.split(server))
    except ValueError as problem:
        raise ConfigError(f"environment.server: {problem}, found '{server}'.") from None
    if not over_http and not command:
        raise ConfigError("environment.server: expected an address or a command, found neither.")
    missing = [name for name in variables if name not in os.environ]
    if missing:
        raise ConfigError(f"environment.variables: '{missing[0]}' is not set.")
    passed = {name: os.environ[name] for name in (*INHERITED, *variables) if name in os.environ}
    passed[MARK] = secrets.token_hex(8)
    return Server(server, command, bearer(api_key_variable), passed, timeout_s, start_s)


async def _schemas(server: Server) -> list[dict[str, Any]]:
    session = await McpSession(server).open()
    try:
        return [
            tool_schema(tool.name, tool.description or "", tool.input_schema)
            for tool in await session.tools()
        ]
    finally:
        await session.close()


def _offered(schemas: list[dict[str, Any]], only: Sequence[str]) -> tuple[dict[str, Any], ...]:
    named = {schema["function"]["name"]: schema for schema in schemas}
    if not named:
        raise ConfigError("environment.server: it has no tools.")
    offered = chosen(only or named, named, "environment.only", "tool")
    return tuple(named[name] for name in named if name in offered)


def _without_loop(asked: Any) -> Any:
    """What a coroutine returns, awaited in a thread: a loop may run in this one. Raises
    ConfigError for an McpError."""
    with ThreadPoolExecutor(1) as thread:
        try:
            return thread.submit(asyncio.run, asked).result()
        except McpError as problem:
            raise ConfigError(f"environment.server: {problem}") from None
