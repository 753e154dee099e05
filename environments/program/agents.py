"""Episodes of an agent that asks the policy through an endpoint: each of its requests is a turn."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from rlflow.environment import Environment
from rlflow.errors import ConfigError, PolicyError
from rlflow.report.metrics import Metric
from rlflow.types import Episode, Step, Task
from rlflow_environments.endpoint import AgentSession, Endpoint
from rlflow_environments.program.running import AgentProcess, AgentTask, ProgramError

_BROKEN = (
    "most requests continue no open conversation: the agent rewrites its history, and every turn "
    "is a segment of its own; send messages back as they came"
)


class AgentEnvironment(Environment):
    """An environment whose agent is started for each episode and asks at an address of its own.

    plain: the model has no chat template. ignore: parameters that training cannot honour are left
    out and counted. timeout_s: between two requests. An agent that fails aborts the episode; one
    that raises PolicyError, or ends with BLAMES_POLICY, ends it as a wrong one; one that was
    refused a response, as a limit was reached, is truncated however it ends."""

    metrics = {
        "score": Metric("reward", "what the agent's episode was worth", score=True),
        "requests": Metric("per episode", "responses that the agent asked for"),
        "broken_histories": Metric(
            "share",
            "of requests that continued no open conversation; each starts a segment",
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
            advice="the policy's calls of tools cannot be read; expected the form of its chat "
            "template (docs/write_an_environment.md)",
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
        "endpoint/abandoned": Metric(
            "requests", "whose client hung up before the answer", reduction="sum"
        ),
    }

    def __init__(
        self, plain: bool, ignore: bool, timeout_s: float, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        """Raises ConfigError, MissingPackageError."""
        if not 0 <= port < 1 << 16:
            raise ConfigError(f"environment.port: expected 0 to 65535, found {port}.")
        self._plain, self._ignore, self._timeout_s = plain, ignore, timeout_s
        self._place = (host, port)
        Endpoint(*self._place)  # are its packages there?
        self._temperature: float | None = None
        self._served: tuple[asyncio.AbstractEventLoop, asyncio.Task[Endpoint]] | None = None
        self.held = contextlib.AsyncExitStack()
        """What all agents share, ended with the environment."""

    @abstractmethod
    async def start(self, task: Task, session: AgentSession, url: str) -> AgentProcess | AgentTask:
        """The agent of an episode, which asks at the URL or with a `client`. Raises
        ProgramError."""

    @abstractmethod
    async def score(self, episode: Episode) -> float:
        """The reward of an episode whose agent has ended. Raises ProgramError for none."""

    def sampled_at(self, temperature: float) -> None:
        self._temperature = temperature

    async def reset(self, task: Task) -> Episode:
        endpoint = await self._endpoint()
        session = AgentSession(self._temperature, self._ignore, self._plain)
        state: dict[str, Any] = {"session": session, "endpoint": endpoint, "agent": None}
        try:
            state["agent"] = await self.start(task, session, endpoint.open(session))
            step = await self._next(state)
            if step is None:
                agent = state["agent"]
                told = agent.failure or agent.fault or f"it ended: {agent.last_lines()}"
                raise ProgramError(f"the agent asked for no response; {told}")
        except BaseException:
            await self._ended(state)  # an episode that did not begin is not closed
            raise
        begun = dataclasses.replace(task, prompt=step.observation)
        return Episode(begun, scratch=state, opening=step)

    async def step(self, episode: Episode, response: str) -> Step:
        episode.scratch["session"].give(episode, response)
        return await self._go_on(episode)

    async def overflow(self, episode: Episode) -> Step | None:
        refused = episode.scratch["session"].refuse(episode.unshown)
        return await self._go_on(episode) if refused else None  # it ended, with its reward

    async def close(self, episode: Episode) -> None:
        await self._ended(episode.scratch)

    def report(self) -> dict[str, float]:
        served = self._served
        if served is None or not served[1].done() or served[1].exception():
            return {}
        endpoint = served[1].result()
        counts = {
            "endpoint/outside": float(endpoint.outside),
            "endpoint/abandoned": float(endpoint.abandoned),
        }
        endpoint.outside = endpoint.abandoned = 0
        return counts

    def shutdown(self) -> None:
        self._let_go()
        served, self._served = self._served, None
        if served is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop ends at the same time
            asyncio.run_coroutine_threadsafe(self.held.aclose(), served[0]).result(10.0)

    def _let_go(self) -> None:
        """Gives back the port of a loop that was closed with its endpoint open."""
        if self._served is not None and self._served[0].is_closed():
            begun, self._served = self._served[1], None
            if begun.done() and not begun.cancelled() and not begun.exception():
                begun.result().release()

    async def _endpoint(self) -> Endpoint:
        """The endpoint of this event loop: checks have another one than a run."""
        loop = asyncio.get_running_loop()
        if self._served is None or self._served[0] is not loop:
            self._let_go()
            self.held = contextlib.AsyncExitStack()
            self._served = (loop, loop.create_task(self.begin()))
        return await asyncio.shield(self._served[1])

    async def begin(self) -> Endpoint:
        """Starts what all agents share."""
        endpoint = Endpoint(*self._place)
        self.held.push_async_callback(endpoint.stop)
        await endpoint.start()
        return endpoint

    def client(self, session: AgentSession, url: str) -> Any:
        """A client of OpenAI's interface, which calls the server's application without a socket."""
        import openai

        assert self._served is not None, "the endpoint's, which an episode begins with"
        application = self._served[1].result().application
        default: Any = openai.DefaultAsyncHttpxClient
        httpx: Any = importlib.import_module(default.__mro__[1].__module__.partition(".")[0])
        transport = httpx.ASGITransport(application, raise_app_exceptions=False)
        client = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key=session.key, http_client=default(transport=transport)
        )
        completions = client.chat.completions
        completions.create = functools.partial(_create, completions.create)
        return client

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
        agent, session = state["agent"], state["session"]
        try:
            step = await self._next(state)
        except ProgramError:
            if not session.truncated:
                raise
            step = None
        if step is not None:
            step.metrics = _metrics(session)
            return step
        if (agent.failure or not episode.turns) and not session.truncated:
            raise ProgramError(f"the agent {agent.failure or 'got no response'}")
        try:
            if agent.fault is not None and not session.truncated:
                raise agent.fault
            score = await self.score(episode)
        except PolicyError as fault:
            metrics = {**_metrics(session), "score": fault.reward, **fault.metrics}
            raise PolicyError(str(fault), fault.reward, metrics, fault.rewards) from fault
        metrics = {**_metrics(session), "score": score}
        terminated = not session.truncated or episode.turns_left != 0
        return Step(reward=score, terminated=terminated, metrics=metrics)

    async def _ended(self, state: Mapping[str, Any]) -> None:
        try:
            if state["agent"] is not None:  # first, as what it asks later would be out of place
                await state["agent"].stop()
        finally:
            state["endpoint"].close(state["session"])


async def _create(create: Any, *, messages: Any, extra_body: Any = None, **body: Any) -> Any:
    """The client's own `create`, which tries a message as every type that it may be: half of a
    request's time, and more with each turn. What is in `extra_body` it writes as it is."""
    extra_body = {**(extra_body or {}), "messages": [*messages]}
    return await create(messages=(), extra_body=extra_body, **body)


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
