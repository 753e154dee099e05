"""The requests of one episode's agent, one after the other, as the steps of an environment."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from rlflow.endpoint.history import Continuation, SaidHistory
from rlflow.endpoint.requests import (
    CONTEXT,
    TURNS,
    ModelReply,
    ModelRequest,
    RequestRefused,
    ToolCall,
    assistant,
    unsupported,
)
from rlflow.endpoint.text_calls import ReadResponse, read_response
from rlflow.types import Episode, Observation, Step

ENDED = "episode_ended"
REFUSALS = {
    ENDED: (403, "the episode has ended."),
    TURNS: (
        400,
        "the episode's last response was given: rollout.max_turns, or one of its token limits.",
    ),
    CONTEXT: (
        400,
        "the conversation leaves no room for a response: rollout.max_total_tokens, or what the "
        "engine can hold. Shorten it, and ask again.",
    ),
}
"""Code -> (status, text)."""


@dataclass
class RequestCounts:
    """What became of an episode's requests. broken: those after the first that did not go on from
    the last response; ignored: sampling parameters; calls: of tools, failed ones left out."""

    requests: int = 0
    broken: int = 0
    ignored: int = 0
    offered: bool = False
    calls: int = 0
    failed_calls: int = 0


@dataclass
class _Asked:
    """A request that waits for its response, and the step that it becomes."""

    request: ModelRequest
    reply: asyncio.Future[ModelReply]
    continuation: Continuation | None = None


@dataclass
class AgentSession:
    """One episode's end of the endpoint. The agent asks, through a server; the environment takes
    one request at a time, as a Step, and gives back what the rollout sampled for it. Requests that
    arrive meanwhile wait their turn.

    temperature: of training. ignore: leave out sampling parameters that training cannot honour,
    and count them, instead of refusing. plain: the messages' contents stand one behind the other as
    text, for models without a chat template."""

    temperature: float | None = None
    ignore: bool = False
    plain: bool = False
    key: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    counts: RequestCounts = field(default_factory=RequestCounts)
    posted: dict[str, Any] | None = None
    truncated: bool = False
    """Whether a limit refused what the agent asked."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The last conversation, its response included."""
    conversations: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Those that requests may name instead of sending them, by the ids of their last replies."""

    def __post_init__(self) -> None:
        self._history = SaidHistory()
        self._waiting: deque[_Asked] = deque()
        self._current: _Asked | None = None
        self._replies: dict[str, asyncio.Future[ModelReply]] = {}
        self._arrived = asyncio.Event()
        self._refusal = ""  # the code of what is answered from now on
        self._turns = 0

    async def ask(self, request: ModelRequest, name: str = "", again: bool = False) -> ModelReply:
        """The policy's response, waited for. again: the request of this name may have come before,
        and its answer have been lost: it gets the same one. Raises RequestRefused."""
        if again and name in self._replies:
            return await asyncio.shield(self._replies[name])
        self._check(request)
        reply: asyncio.Future[ModelReply] = asyncio.get_running_loop().create_future()
        self._replies[name] = reply
        self._waiting.append(_Asked(request, reply))
        self._arrived.set()
        return await asyncio.shield(reply)

    async def next(self, ended: asyncio.Future[Any]) -> Step | None:
        """The step that the agent's next request is; None once the agent has ended."""
        while not self._waiting:
            self._arrived.clear()
            arrived = asyncio.ensure_future(self._arrived.wait())
            try:
                await asyncio.wait({arrived, ended}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                arrived.cancel()
            if ended.done() and not self._waiting:
                return None
        self._current = self._waiting.popleft()
        return self._step(self._current)

    def give(self, episode: Episode, response: str) -> None:
        """Answers the request under way with what was sampled for it. At the end of the episode's
        turns all further ones are refused."""
        asked, self._current = self._current, None
        assert asked is not None and asked.continuation is not None
        if episode.turns_left == 0:
            self._refuse_all(TURNS)
        reply = self._reply(asked.request, episode, response)
        said = reply.message()
        stopped = assistant(reply.content + (reply.stop_string or ""), ())
        forms = (said, stopped, assistant(response, ()))
        self._history.record(asked.continuation.place, self._turns, response, forms)
        self._turns += 1
        self.messages = [*asked.request.messages, said]
        if not asked.reply.done():
            asked.reply.set_result(reply)

    def too_long(self) -> None:
        """Refuses the request under way: its conversation leaves no room for a response."""
        asked, self._current = self._current, None
        if asked is not None:
            self._refuse(asked, CONTEXT)

    def close(self) -> None:
        """Refuses whatever is asked or still waits."""
        self._refuse_all(ENDED)
        if self._current is not None:
            self._refuse(self._current, ENDED)

    def _refuse_all(self, code: str) -> None:
        self._refusal = code
        while self._waiting:
            self._refuse(self._waiting.popleft(), code)

    def _refuse(self, asked: _Asked, code: str) -> None:
        refused = self._refused(code)
        if not asked.reply.done():
            asked.reply.set_exception(refused)
            asked.reply.exception()  # nobody may be left to read it

    def _refused(self, code: str) -> RequestRefused:
        self.truncated = self.truncated or code in (TURNS, CONTEXT)
        status, text = REFUSALS[code]
        return RequestRefused(text, status=status, code=code)

    def _check(self, request: ModelRequest) -> None:
        if self._refusal:
            raise self._refused(self._refusal)
        if not request.messages:
            raise RequestRefused("messages: expected one at the least, found none.")
        if self.plain and request.tools:
            raise RequestRefused(
                "tools: the policy reads plain text, and has no chat template that shows tools; "
                "describe them in a message.",
                parameter="tools",
            )
        wrong = unsupported(request.sampling, self.temperature)
        if wrong and not self.ignore:
            told = "; ".join(f"{name}: expected {wanted}" for name, wanted in wrong.items())
            raise RequestRefused(
                f"{told}, found {', '.join(repr(request.sampling[name]) for name in wrong)}. A "
                "policy is trained on what it samples itself, at rollout.temperature; leave these "
                "out, or set environment.sampling=ignore.",
                code="unsupported_value",
                parameter=next(iter(wrong)),
            )
        self.counts.ignored += len(wrong)

    def _step(self, asked: _Asked) -> Step:
        request, last = asked.request, self._turns - 1
        self.counts.requests += 1
        self.counts.offered = self.counts.offered or bool(request.tools)
        found = asked.continuation = self._history.find(request)
        self.counts.broken += last >= 0 and found.after != last
        observation: Observation = found.messages
        if self.plain:
            observation = "".join(message["content"] for message in found.messages)
        fresh = found.after < 0
        return Step(
            observation,
            after=None if found.after == last else found.after,
            tools=request.tools if fresh and request.tools else None,
            stop=request.stop,
            max_tokens=request.max_tokens,
        )

    def _reply(self, request: ModelRequest, episode: Episode, response: str) -> ModelReply:
        content, stop_string = response, None
        found = [(response.find(stop), stop) for stop in request.stop if stop in response]
        if found:
            place, stop_string = min(found)
            content = response[: place + len(stop_string) * request.include_stop]
        read = read_response(content) if request.tools else ReadResponse(content)
        self.counts.calls += len(read.calls)
        self.counts.failed_calls += read.failed
        calls = [
            ToolCall(
                call.name,
                json.dumps(call.arguments, ensure_ascii=False),
                f"call_{self._turns}_{number}",
            )
            for number, call in enumerate(read.calls)
        ]
        sampled = episode.sampled
        pairs: list[tuple[str, float]] = []
        if request.logprobs:
            pairs = list(zip(sampled.texts(), sampled.logprobs, strict=True))
        return ModelReply(
            id=f"{self.key[:8]}-{self._turns}",
            created=int(time.time()),
            request=request,
            content=read.content,
            calls=calls,
            ended="length" if episode.cut else "tool_calls" if calls else "stop",
            stop_string=stop_string,
            prompt_tokens=sampled.prompt_tokens,
            response_tokens=len(sampled.logprobs),
            logprobs=pairs,
        )
