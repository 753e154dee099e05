"""An agent of the user's own, which asks the policy through an endpoint, as an environment."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import inspect
import math
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rlflow.components import Kind, names_code
from rlflow.endpoint import AgentSession, Endpoint
from rlflow.environment import Environment
from rlflow.errors import ConfigError, install_command, needing
from rlflow.report.metrics import Metric
from rlflow.types import Episode, Observation, Step, Task
from rlflow.values import PositiveFloat
from rlflow_environments.common.jsonl import BadRow, existing, parse_object, records, refuse
from rlflow_environments.program.running import AgentProcess, AgentTask, ProgramError

AGENT = Kind("agent", call=2)
"""`async def agent(task, client)`, the task a dict, the client an openai.AsyncOpenAI."""
REWARD = Kind("reward", call=2)
"""`def reward(task, played)`, async or not: a number. played: `output`, `returned`, `messages`."""
HELD_BACK = ("agent", "answer", "answers", "solution", "solutions")
"""Keys of a row that the reward sees, and the agent does not."""
PROMPTS = ("prompt", "question", "instruction", "problem")
"""Keys of a row whose text stands for the task in displays."""
_BROKEN = (
    "most requests do not go on from the last response: the agent rewrites its history, and every "
    "turn is a segment of its own; send messages back as they came"
)


class ProgramEnvironment(Environment):
    """agent: a command, started for each episode, or `file.py:function` of this process; a row may
    have an `agent` of its own. train, val: files of JSON rows. reward: `file.py:function`.
    reward_command: a command; its last line is a number, or its exit code says whether the episode
    went well. Without either the agent posts its reward, or returns it.

    messages: `text` where the model has no chat template. sampling: what becomes of parameters that
    training cannot honour. timeout_s: between two requests, and of a reward. variables: for the
    programs' environment. An agent that fails aborts the episode; one that was refused a response,
    as a limit was reached, is truncated however it ends."""

    shorthand = "agent"
    metrics = {
        "score": Metric("reward", "what the agent's episode was worth", score=True),
        "requests": Metric("per episode", "responses that the agent asked for"),
        "broken_histories": Metric(
            "share",
            "of requests that did not go on from the last response; each starts a segment",
            alarm=0.5,
            advice=_BROKEN,
        ),
        "tool_calls": Metric("per episode", "calls of tools that could be read"),
        "tools_unused": Metric(
            "share",
            "of episodes with tools that called none",
            alarm=0.99,
            advice="the agent offers tools, and the policy calls none: does its chat template show "
            "them, and can it call?",
        ),
        "unreadable_calls": Metric(
            "share",
            "of calls of tools that could not be read",
            alarm=0.9,
            advice="the policy's calls of tools cannot be read; expected <tool_call>JSON"
            "</tool_call>, or one JSON object",
        ),
        "ignored_parameters": Metric("per episode", "sampling parameters that were left out"),
        "endpoint/outside": Metric(
            "requests",
            "that came with no key of an open episode",
            reduction="sum",
            alarm=0.0,
            advice="requests reach the endpoint that belong to no open episode: give each program "
            "the address and key of its own episode, and end what outlives it",
        ),
    }

    def __init__(
        self,
        agent: str | None = None,
        train: str | Path | None = None,
        val: str | Path | None = None,
        *,
        reward: str | None = None,
        reward_command: str | None = None,
        messages: Literal["template", "text"] = "template",
        sampling: Literal["refuse", "ignore"] = "refuse",
        timeout_s: PositiveFloat = 300.0,
        variables: dict[str, str] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        """Raises ConfigError, DataError, MissingPackageError."""
        if reward is not None and reward_command is not None:
            raise ConfigError("environment: expected reward or reward_command, found both.")
        self._plain, self._ignore = messages == "text", sampling == "ignore"
        files = {"train": train, "val": val}
        rows = {split: _rows(path) for split, path in files.items() if path is not None}
        self._agent = agent
        without = agent is None and any("agent" not in row for own in rows.values() for row in own)
        if without or not rows:
            raise ConfigError(
                "environment program: expected agent=COMMAND or agent=file.py:function, and "
                "train=ROWS.jsonl or val=ROWS.jsonl of tasks."
            )
        self._tasks = {split: self._made(split, own) for split, own in rows.items()}
        functions = {row["agent"] for own in rows.values() for row in own if "agent" in row}
        self._functions = {
            name: AGENT.resolve(name, "environment.agent")
            for name in {*functions, *([agent] if agent else [])}
            if _is_function(name)
        }
        self._reward = REWARD.resolve(reward, "environment.reward") if reward else None
        self._reward_command = reward_command
        self._timeout_s, self._variables = timeout_s, dict(variables or {})
        if self._functions:
            with needing("agents of this process", install_command("agents")):
                importlib.import_module("openai")
        self._place = (host, port)
        Endpoint(*self._place)  # are its packages there?
        self._temperature: float | None = None
        self._served: tuple[asyncio.AbstractEventLoop, asyncio.Task[Endpoint]] | None = None
        self._clients: dict[str, Any] = {}

    @classmethod
    def evaluation_options(cls, path: str) -> dict[str, Any]:
        """The tasks for validation are those at `path`."""
        return {"val": path, "train": None}

    def tasks(self, split: str) -> Sequence[Task]:
        return self._tasks.get(split, [])

    def sampled_at(self, temperature: float) -> None:
        self._temperature = temperature

    def _made(self, split: str, rows: Sequence[dict[str, Any]]) -> list[Task]:
        tasks = []
        for number, row in enumerate(rows):
            text = next((row[key] for key in PROMPTS if isinstance(row.get(key), str)), str(row))
            prompt: Observation = text if self._plain else [{"role": "user", "content": text}]
            name = str(row.get("id", f"{split}-{number}"))
            tasks.append(Task(name, prompt, row.get("answer"), {"row": row}))
        return tasks

    async def reset(self, task: Task) -> Episode:
        endpoint = await self._endpoint()
        session = AgentSession(self._temperature, self._ignore, self._plain)
        state: dict[str, Any] = {"session": session, "endpoint": endpoint, "agent": None}
        try:
            state["agent"] = await self._start(task, session, endpoint)
            step = await self._next(state)
            if step is None:
                agent = state["agent"]
                told = agent.failure or f"it ended: {agent.last_lines()}"
                raise ProgramError(f"the agent asked for no response; {told}")
        except BaseException:
            await self._ended(state)  # an episode that did not begin is not closed
            raise
        step.after = None
        begun = dataclasses.replace(task, prompt=step.observation)
        return Episode(begun, scratch=state, opening=step)

    async def step(self, episode: Episode, response: str) -> Step:
        episode.scratch["session"].give(episode, response)
        return await self._go_on(episode)

    async def overflow(self, episode: Episode) -> Step:
        episode.scratch["session"].too_long()
        return await self._go_on(episode)

    async def close(self, episode: Episode) -> None:
        await self._ended(episode.scratch)

    def report(self) -> dict[str, float]:
        served = self._served
        if served is None or not served[1].done() or served[1].exception():
            return {}
        endpoint = served[1].result()
        outside, endpoint.outside = endpoint.outside, 0
        return {"endpoint/outside": float(outside)}

    def shutdown(self) -> None:
        served, self._served = self._served, None
        if served is None or served[0].is_closed():
            return

        async def stop() -> None:
            with contextlib.suppress(Exception):  # one that did not start has been told of
                await (await served[1]).stop()
            for client in self._clients.values():
                await client.close()

        with contextlib.suppress(RuntimeError):  # the loop ends at the same time
            asyncio.run_coroutine_threadsafe(stop(), served[0]).result(10.0)

    async def _endpoint(self) -> Endpoint:
        """The endpoint of this event loop: checks have another one than a run."""
        loop = asyncio.get_running_loop()
        if self._served is None or self._served[0] is not loop:
            self._clients = {}
            self._served = (loop, loop.create_task(self._begun()))
        return await asyncio.shield(self._served[1])

    async def _begun(self) -> Endpoint:
        endpoint = Endpoint(*self._place)
        await endpoint.start()
        return endpoint

    async def _start(
        self, task: Task, session: AgentSession, endpoint: Endpoint
    ) -> AgentProcess | AgentTask:
        url = endpoint.open(session)
        row = task.metadata["row"]
        given = {key: value for key, value in row.items() if key not in HELD_BACK}
        given = {"id": task.id, **given}
        agent: str = row.get("agent", self._agent)
        if agent in self._functions:
            client = self._client(endpoint, session.key, url)
            return AgentTask(self._functions[agent], given, client)
        bypass = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
        variables = {
            **bypass,
            **self._variables,
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": session.key,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": session.key,
            "RLFLOW_EPISODE": f"{task.id}/{secrets.token_hex(8)}",
        }
        return await AgentProcess.start(f"agent of {task.id}", agent, given, variables)

    def _client(self, endpoint: Endpoint, key: str, url: str) -> Any:
        """A client of OpenAI's interface, which calls the server's application without a socket."""
        import openai

        if not self._clients:
            default: Any = openai.DefaultAsyncHttpxClient
            httpx: Any = importlib.import_module(default.__mro__[1].__module__.partition(".")[0])
            transport = httpx.ASGITransport(endpoint.application, raise_app_exceptions=False)
            self._clients["openai"] = openai.AsyncOpenAI(
                base_url=url, api_key=key, http_client=default(transport=transport)
            )
        return self._clients["openai"].copy(base_url=f"{url}/v1", api_key=key)

    async def _next(self, state: Mapping[str, Any]) -> Step | None:
        """The agent's next request; None once it has ended. Raises ProgramError."""
        agent = state["agent"]
        try:
            async with asyncio.timeout(self._timeout_s):
                return await state["session"].next(agent.ended)
        except TimeoutError:
            raise ProgramError(
                f"the agent neither asked nor ended within {self._timeout_s:g} s "
                f"(environment.timeout_s): {agent.last_lines()}"
            ) from None

    async def _go_on(self, episode: Episode) -> Step:
        state = episode.scratch
        step = await self._next(state)
        if step is not None:
            step.metrics = _metrics(state["session"])
            return step
        agent, session = state["agent"], state["session"]
        if agent.failure and not session.truncated:
            raise ProgramError(f"the agent {agent.failure}")
        score = await self._scored(episode)
        metrics = {**_metrics(session), "score": score}
        return Step(reward=score, terminated=not session.truncated, metrics=metrics)

    async def _scored(self, episode: Episode) -> float:
        """The episode's reward. Raises ProgramError where there is none."""
        state, task = episode.scratch, episode.task
        agent, session = state["agent"], state["session"]
        found: Any = agent.returned
        if self._reward is not None:
            played = {"output": agent.output, "returned": found, "messages": session.messages}
            found = await self._judged(task.metadata["row"], played)
        elif self._reward_command is not None:
            if not isinstance(agent, AgentProcess):
                raise ConfigError("environment.reward_command: the agent is no program.")
            found = _number_of(*await agent.judge(self._reward_command, self._timeout_s))
        elif session.posted is not None:
            found = session.posted["reward"]
        elif session.truncated and not isinstance(found, (int, float)):
            return 0.0
        if not isinstance(found, (int, float)) or not math.isfinite(found):
            raise ProgramError(
                "the episode has no reward: expected a number from environment.reward or "
                "reward_command, or one that the agent posts to $OPENAI_BASE_URL/reward or "
                f"returns; found {found!r:.60}; the agent's output: {agent.last_lines()}"
            )
        return float(found)

    async def _judged(self, row: dict[str, Any], played: dict[str, Any]) -> Any:
        """What the reward's function says; a plain one in a thread."""
        function: Any = self._reward
        async with asyncio.timeout(self._timeout_s):
            if inspect.iscoroutinefunction(function):
                return await function(row, played)
            return await asyncio.to_thread(function, row, played)

    async def _ended(self, state: Mapping[str, Any]) -> None:
        try:
            if state["agent"] is not None:  # first, as what it asks later would be out of place
                await state["agent"].stop()
        finally:
            state["endpoint"].close(state["session"])


def _rows(path: str | Path) -> list[dict[str, Any]]:
    file = existing(path, "tasks")
    rows, bad = [], []
    for line, _, record in records(file.read_bytes()):
        try:
            rows.append(parse_object(record))
        except BadRow as problem:
            bad.append((f"line {line}", str(problem)))
    refuse(file, "tasks", bad, len(rows))
    return rows


def _is_function(agent: str) -> bool:
    return names_code(agent) and not any(character.isspace() for character in agent)


def _number_of(code: int, output: str) -> float:
    """What a reward command says: the number on its last line, or whether it ended well. Raises
    ProgramError where it was killed."""
    if code < 0:
        raise ProgramError(f"environment.reward_command was killed by signal {-code}")
    lines = output.split()
    with contextlib.suppress(ValueError, IndexError):
        number = float(output.strip().splitlines()[-1]) if lines else math.nan
        if code == 0 and math.isfinite(number):
            return number
    return float(code == 0)


def _metrics(session: AgentSession) -> dict[str, float]:
    counts = session.counts
    tried = counts.calls + counts.failed_calls
    posted = session.posted["metrics"] if session.posted else {}
    return {
        **{name: float(value) for name, value in posted.items()},
        "requests": float(counts.requests),
        "broken_histories": counts.broken / max(1, counts.requests - 1),
        "tool_calls": float(counts.calls),
        "tools_unused": float(counts.offered and not tried),
        "unreadable_calls": counts.failed_calls / max(1, tried),
        "ignored_parameters": float(counts.ignored),
    }
