"""Environments of an OpenEnv server: a session over a websocket for every episode.

Source: the messages of openenv 0.10 (`openenv/core/env_server/http_server.py`), which 0.2 and 0.3
speak too: `reset`, `step` and `close` to /ws, answered by `observation` or `error`; GET /schema has
the fields of an action. The package is not needed for it.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import aiohttp

from rlflow.environment import Environment
from rlflow.errors import ConfigError, RLFlowError, described
from rlflow.net.http import GaveUp, Retryable, RetryPolicy, fetch
from rlflow.report.metrics import Metric
from rlflow.types import Episode, Step, Task
from rlflow.values import PositiveFloat, PositiveInt
from rlflow_environments.adapters.text import bearer, beginning_with, formatted, seeded_tasks
from rlflow_environments.common.text import load_json

RESPONSE = "{response}"
SHOWN = ("type", "enum", "description")  # of a field, in the prompt
LONGEST_MESSAGE = 100 * 2**20  # bytes, as in OpenEnv's own client
HEARTBEAT_S = 20.0  # as there: between pings; a server that leaves one unanswered is gone
CLOSING_S = 5.0
NO_ACTION = ("VALIDATION_ERROR", "INVALID_JSON")
"""Codes with which a server refuses what it got as an action."""


class OpenEnvError(RLFlowError):
    """The server failed, or is gone: the episode is aborted, neither good nor bad."""


class NotAnActionError(OpenEnvError):
    """The server does not accept what it got as an action."""


class OpenEnv(Environment):
    """The server's reward and end are the episode's. What it does not accept as an action is
    answered with an observation; any other failure aborts the episode, and so does an end without a
    reward, which is no verdict."""

    shorthand = "url"
    metrics = {
        "finished": Metric("share", "of episodes that the environment ended"),
        "invalid_actions": Metric("per episode", "responses that were no action"),
    }

    def __init__(
        self,
        url: str,
        prompt: str = "Answer with one action per line. An action is {action}.\n",
        action: dict[str, Any] | None = None,
        formatter: str | None = None,
        stop: Sequence[str] = ("\n",),
        tasks_per_split: PositiveInt = 256,
        options: dict[str, Any] | None = None,
        timeout_s: PositiveFloat = 60.0,
        wait_s: PositiveFloat = 300.0,
        api_key_variable: str | None = None,
    ) -> None:
        """prompt: what stands before the first observation; {action} says what can be done. action:
        an action in which "{response}" is what the policy said (default: its only field that is
        needed; where several are, the response is the action, as JSON). formatter:
        `file.py:function` of an observation's fields, which gives its text (default: that of a
        single field, else JSON). tasks_per_split: seeds of `reset`, which gets the `options` too.
        timeout_s: of one message. wait_s: for a session, where the server holds as many as it may.
        api_key_variable: the environment variable of a bearer token. Raises ConfigError."""
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                "environment.url: expected an address such as http://localhost:8000, found "
                f"'{url}'."
            )
        self._headers = bearer(api_key_variable)
        self._url, self._timeout_s = url.rstrip("/"), timeout_s
        self._patience = RetryPolicy(None, 0.2, 1.0, wait_s)
        fields, needed = _fields_of_an_action(self._url, self._headers)
        self._action = action or ({needed[0]: RESPONSE} if len(needed) == 1 else None)
        described_as = (
            "text"
            if action
            else json.dumps(fields[needed[0]] if self._action else fields, ensure_ascii=False)
        )
        self._prompt = prompt.replace("{action}", described_as)
        self._text = formatted(formatter, _as_text)
        self._options, self._count, self.stop = options or {}, tasks_per_split, tuple(stop)

    def tasks(self, split: str) -> Sequence[Task]:
        return seeded_tasks(split, self._prompt, self._count)

    async def reset(self, task: Task) -> Episode:
        """A session, waited for where the server has none to spare; its first observation ends the
        prompt."""
        options = {"seed": task.answer, **self._options}
        try:
            session, result = await self._patience.call_async(
                lambda deadline: self._opened(options), random.Random()
            )
        except GaveUp as end:
            raise OpenEnvError(
                f"{self._url}: no session within {self._patience.timeout_s:g} s ({end.last}); let "
                "the server hold more (max_concurrent_envs), or set environment.wait_s."
            ) from None
        text = self._text(result["observation"])
        return Episode(beginning_with(task, text), scratch={"session": session, "invalid": 0})

    async def step(self, episode: Episode, response: str) -> Step:
        state = episode.scratch
        try:
            if self._action:
                action = _filled(self._action, response.strip())
            else:
                action = load_json(response.encode(errors="replace"))
                json.dumps(action, allow_nan=False)  # no JSON to others
            result = await state["session"].ask("step", action)
        except (NotAnActionError, ValueError, RecursionError) as problem:
            state["invalid"] += 1
            metrics = {"finished": 0.0, "invalid_actions": float(state["invalid"])}
            return Step(f"Not an action: {problem}\n", metrics=metrics)
        done = bool(result.get("done"))
        reward = _reward_of(result.get("reward"), done, self._url, result["observation"])
        metrics = {"finished": float(done), "invalid_actions": float(state["invalid"])}
        return Step(f"{self._text(result['observation'])}\n", reward, done, metrics)

    async def close(self, episode: Episode) -> None:
        await episode.scratch["session"].close()

    async def _opened(self, options: dict[str, Any]) -> tuple[_Session, dict[str, Any]]:
        """A session that was reset, and what it shows. Raises Retryable, OpenEnvError."""
        session = _Session(self._url, self._headers, self._timeout_s)
        try:
            return session, await session.begin(options)
        except BaseException:
            await session.close()
            raise


class _Session:
    """One websocket, and the episode behind it."""

    def __init__(self, url: str, headers: dict[str, str], timeout_s: float) -> None:
        self._url, self._timeout_s = url, timeout_s
        self._client = aiohttp.ClientSession(headers=headers)
        self._socket: Any = None

    async def begin(self, options: dict[str, Any]) -> dict[str, Any]:
        """The first observation. Raises Retryable, OpenEnvError."""
        try:
            async with asyncio.timeout(self._timeout_s):
                self._socket = await self._client.ws_connect(
                    f"{self._url}/ws", heartbeat=HEARTBEAT_S, max_msg_size=LONGEST_MESSAGE
                )
        except (aiohttp.ClientError, OSError) as failure:  # TimeoutError is one of them
            raise OpenEnvError(f"{self._url}/ws: no connection: {described(failure)}.") from None
        return await self.ask("reset", options)

    async def ask(self, kind: str, data: Any) -> dict[str, Any]:
        """The server's observation. Raises NotAnActionError, Retryable where it has no session to
        spare, OpenEnvError."""
        try:
            async with asyncio.timeout(self._timeout_s):
                # It may have said why it closed: that is still to be read
                with suppress(ConnectionError):
                    await self._socket.send_str(json.dumps({"type": kind, "data": data}))
                message = await self._socket.receive()
            answer = json.loads(message.data) if isinstance(message.data, str) else None
        except TimeoutError:
            raise OpenEnvError(
                f"{self._url}: no answer to '{kind}' within {self._timeout_s:g} s."
            ) from None
        except (OSError, ValueError) as failure:
            raise OpenEnvError(f"{self._url}: '{kind}' failed: {described(failure)}.") from None
        if not isinstance(answer, dict) or not isinstance(answer.get("data"), dict):
            raise OpenEnvError(
                f"{self._url}: the server closed the session at '{kind}' "
                f"({message.type.name.lower()})."
            )
        data = answer["data"]
        if answer.get("type") == "observation" and isinstance(data.get("observation"), dict):
            return data
        told = " ".join(f"{data.get('message')} {data.get('errors', '')}".split())[:500]
        if data.get("code") == "CAPACITY_REACHED":
            raise Retryable(told)
        if data.get("code") in NO_ACTION and kind == "step":
            raise NotAnActionError(told)
        raise OpenEnvError(f"{self._url}: '{kind}' failed on the server: {told}")

    async def close(self) -> None:
        """Ends the session on the server too, which frees its place there."""
        with suppress(Exception):  # a server that is gone has closed it already
            async with asyncio.timeout(CLOSING_S):
                await self._socket.send_str('{"type": "close"}')
                await self._socket.close()
        await self._client.close()


def _fields_of_an_action(url: str, headers: dict[str, str]) -> tuple[dict[str, Any], list[str]]:
    """(name -> what the JSON schema says of it, the names of those that are needed; of all, where
    none is). Raises ConfigError where no OpenEnv server answers."""
    try:
        reply = fetch(f"{url}/schema", headers=headers, proxies=True)
        if reply.status != 200:
            raise Retryable(f"status {reply.status}")
        schema = reply.json()["action"]
        fields = {
            name: {key: field[key] for key in SHOWN if key in field}
            for name, field in schema.get("properties", {}).items()
            if name != "metadata"
        }
        needed = [name for name in schema.get("required", ()) if name in fields]
        return fields, needed or list(fields)
    except (Retryable, ValueError, KeyError, TypeError, AttributeError) as failure:
        why = str(failure) if isinstance(failure, Retryable) else described(failure)
        raise ConfigError(
            f"environment.url: expected an OpenEnv server, found none at {url}/schema ({why}); "
            "start it, or fix the address."
        ) from None


def _reward_of(reward: Any, done: bool, url: str, observation: dict[str, Any]) -> float:
    """The number of a step; 0 where it has none and the episode goes on. Raises OpenEnvError where
    it ends without one, or with what is no number."""
    if reward is None and not done:
        return 0.0
    if isinstance(reward, (int, float)) and math.isfinite(reward):
        return float(reward)
    error = observation.get("error")
    said = error if isinstance(error, str) and error else json.dumps(observation)
    raise OpenEnvError(
        f"{url}: expected a number as the reward{' of the last step' if done else ''}, found "
        f"{reward!r:.60}; it said: {' '.join(said.split())[:300]}"
    )


def _filled(value: Any, response: str) -> Any:
    """An action with the response in its places."""
    if isinstance(value, dict):
        return {key: _filled(item, response) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, response) for item in value]
    return value.replace(RESPONSE, response) if isinstance(value, str) else value


def _as_text(observation: dict[str, Any]) -> str:
    fields = {name: value for name, value in observation.items() if name != "metadata"}
    only = next(iter(fields.values()), "")
    return (
        only
        if len(fields) < 2 and isinstance(only, str)
        else json.dumps(fields, ensure_ascii=False)
    )
