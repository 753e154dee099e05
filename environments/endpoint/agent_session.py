"""The requests of one episode's agent, one after the other, as the steps of an environment."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from rlflow.types import Episode, Observation, Step
from rlflow_environments.common.tool_calls import ReadResponse, reader_of
from rlflow_environments.endpoint.history import Continuation, SaidHistory
from rlflow_environments.endpoint.requests import (
    CONTEXT,
    TEMPLATE_OPTIONS,
    TURNS,
    ModelReply,
    ModelRequest,
    RequestRefused,
    ToolCall,
    assistant,
    unsupported,
)

Gone = Callable[[], Awaitable[bool]]
"""Whether who asked has hung up."""
ENDED = "episode_ended"
KEPT = 64
"""The newest requests of an episode, whose answers a retry can still get."""
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
    """What became of an episode's requests. broken: those after the first that went on from no
    response, or from one that another had gone on from; ignored: sampling parameters; calls: of
    tools, failed ones left out."""

    requests: int = 0
    broken: int = 0
    ignored: int = 0
    offered: bool = False
    calls: int = 0
    failed_calls: int = 0


@dataclass(eq=False)
class _Asked:
    """A request that waits for its response, and the step that it becomes. since: how many responses
    had been given when it came. lost: nobody waits for the answer. queued: it has its place, or was taken from there. retries: that took its answer.
    askers: how many wait for it now."""

    request: ModelRequest
    name: str
    reply: asyncio.Future[ModelReply]
    gone: Gone
    since: int = 0
    lost: bool = False
    queued: bool = False
    retries: int = 0
    askers: int = 0
    continuation: Continuation | None = None

    async def abandoned(self) -> bool:
        """Whether nobody waits for the answer, not even a retry that came meanwhile."""
        gone = self.gone
        if not self.lost and await gone() and self.gone is gone:
            self.lost = True
        return self.lost


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
    metric_names: set[str] = field(default_factory=set)
    """Names that have been posted; an endpoint has one set for all its episodes."""
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
        self._newest: deque[_Asked] = deque(maxlen=KEPT)
        self._awaited: set[_Asked] = set()
        self._arrived = asyncio.Event()
        self._refusal = ""  # the code of what is answered from now on
        self._turns = 0
        self._followed: set[int] = set()  # turns that another one went on from

    async def ask(self, request: ModelRequest, name: str, again: bool, gone: Gone) -> ModelReply:
        """The policy's response, waited for. again: the request of this name may have come before,
        and its answer have been lost: it gets the same one. Raises RequestRefused."""
        asked = await self._lost(name) if again else None
        if asked is None or not asked.queued:
            self._check(request)
        if asked is None:
            reply: asyncio.Future[ModelReply] = asyncio.get_running_loop().create_future()
            asked = _Asked(request, name, reply, gone, self._turns)
            self._newest.append(asked)
        asked.gone = gone
        if not asked.queued:
            asked.request = request  # which was dropped when its asker hung up
            asked.queued = True
            self._waiting.append(asked)
            self._arrived.set()
        asked.askers += 1
        self._awaited.add(asked)
        try:
            found = await asyncio.shield(asked.reply)
        except asyncio.CancelledError:
            if asked.askers == 1:
                self._abandon(asked)
            raise
        finally:
            asked.askers -= 1
            if not asked.askers:
                self._awaited.discard(asked)
        if sum(one.name == name for one in self._newest) > 1:  # a retry must tell them apart
            await asked.abandoned()
        return found

    def _abandon(self, asked: _Asked) -> None:
        """Gives up the place of a request that nobody waits for, and what it says: a retry brings
        both again."""
        asked.lost = True
        if asked in self._waiting:
            self._waiting.remove(asked)
            asked.queued = False
            asked.request = replace(asked.request, messages=[], tools=[])

    async def _lost(self, name: str) -> _Asked | None:
        """Of the requests of a name the oldest whose answer nobody got, else that which the fewest
        retries took."""
        found = [one for one in self._newest if one.name == name]
        for one in found:
            if not one.reply.done():
                await one.abandoned()
        asked = min(found, key=lambda one: (not one.lost, one.retries), default=None)
        if asked is not None:
            asked.retries, asked.lost = asked.retries + 1, False
        return asked

    async def next(self, ended: asyncio.Future[Any]) -> Step | None:
        """The step that the agent's next request is; None once the agent has ended."""
        waited = bool(self._waiting)
        while not ended.done():
            if self._waiting:
                asked = self._take_next()
                if not asked.lost and not (waited and await asked.abandoned()):
                    self._current = asked
                    return self._step(asked)
                asked.queued = False
                continue
            self._arrived.clear()
            arrived = asyncio.ensure_future(self._arrived.wait())
            try:
                await asyncio.wait({arrived, ended}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                arrived.cancel()
        return None

    def _take_next(self) -> _Asked:
        """The request whose turn it is: of those that came between two responses the first by what
        they say, as what they earn must not depend on which one was quicker."""
        asked = min(self._waiting, key=lambda one: (one.since, one.name))
        self._waiting.remove(asked)
        return asked

    def give(self, episode: Episode, response: str) -> None:
        """Answers the request under way with what was sampled for it. At the end of the episode's
        turns all further ones are refused."""
        asked, self._current = self._current, None
        assert asked is not None and asked.continuation is not None
        if episode.turns_left == 0:
            self._refuse_all(TURNS)
        reply = self._reply(asked.request, episode, response)
        said = reply.message()
        stopped = assistant(reply.content + (reply.stop_string or ""), reply.calls)
        forms = (said, stopped, assistant(response, ()))
        self._history.record(asked.continuation.place, self._turns, response, forms)
        self._followed.add(asked.continuation.after)
        self._turns += 1
        self.messages = [*asked.request.messages, said]
        if asked.request.handed_on is not None:
            self.conversations[reply.id] = self.messages[asked.request.handed_on :]
        asked.request = reply.request  # what a retry needs
        if not asked.reply.done():
            asked.reply.set_result(reply)

    def refuse(self, problem: Exception | None) -> bool:
        """Refuses the request under way, if there is one: the model cannot be shown its
        conversation, or that leaves no room for a response."""
        asked, self._current = self._current, None
        if asked is not None:
            if self.ignore and problem is not None and asked.request.template_options:
                self.counts.ignored += 1
                asked.request = replace(asked.request, template_options={})
                self._waiting.appendleft(asked)
                return True
            _refuse(asked, self._refused(CONTEXT) if problem is None else _not_shown(problem))
        return asked is not None

    def close(self) -> None:
        """Refuses whatever somebody still waits for."""
        self._refuse_all(ENDED)
        for asked in (*self._awaited, *filter(None, [self._current])):
            _refuse(asked, self._refused(ENDED))

    def _refuse_all(self, code: str) -> None:
        self._refusal = code
        while self._waiting:
            _refuse(self._waiting.popleft(), self._refused(code))

    def _refused(self, code: str) -> RequestRefused:
        self.truncated = self.truncated or code in (TURNS, CONTEXT)
        status, text = REFUSALS[code]
        return RequestRefused(text, status=status, code=code)

    def _check(self, request: ModelRequest) -> None:
        if self._refusal:
            raise self._refused(self._refusal)
        if not request.messages:
            raise RequestRefused("messages: expected one at the least, found none.")
        if request.messages[-1]["role"] == "assistant" and not self.plain:
            raise RequestRefused(
                "messages: expected the last one of the user or a tool, found one of the "
                "assistant; a response cannot be begun for the policy: leave it out.",
                parameter="messages",
            )
        if self.plain and request.tools:
            raise RequestRefused(
                "tools: the policy reads plain text, and has no chat template that shows tools; "
                "describe them in a message.",
                parameter="tools",
            )
        if self.plain and request.template_options:
            raise RequestRefused(
                f"{TEMPLATE_OPTIONS}: the policy reads plain text, and has no chat template; leave "
                "them out.",
                parameter=TEMPLATE_OPTIONS,
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
        self.counts.broken += last >= 0 and (found.after < 0 or found.after in self._followed)
        observation: Observation = found.messages
        if self.plain:
            observation = "".join(message["content"] for message in found.messages)
        fresh = found.after < 0
        return Step(
            observation,
            after=None if found.after == last and not fresh else found.after,
            tools=request.tools if fresh and request.tools else None,
            template_options=request.template_options if fresh else None,
            stop=request.stop,
            max_tokens=request.max_tokens,
        )

    def _reply(self, request: ModelRequest, episode: Episode, response: str) -> ModelReply:
        content, stop_string = response, None
        found = [(response.find(stop), stop) for stop in request.stop if stop in response]
        if found:
            place, stop_string = min(found)
            content = response[: place + len(stop_string) * request.include_stop]
        if request.tools:
            read = reader_of(episode).read(content, request.tools)
        else:
            read = ReadResponse(content)
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
            request=replace(request, messages=[], tools=[]),
            content=read.content,
            calls=calls,
            ended="length" if episode.cut else "tool_calls" if calls else "stop",
            stop_string=stop_string,
            prompt_tokens=sampled.prompt_tokens,
            response_tokens=len(sampled.logprobs),
            logprobs=pairs,
        )


def _not_shown(problem: Exception) -> RequestRefused:
    """Why the model cannot be shown a request, in words of its chat template."""
    told = str(problem)
    if TEMPLATE_OPTIONS in told:
        return RequestRefused(told, code="unsupported_value", parameter=TEMPLATE_OPTIONS)
    return RequestRefused(told)


def _refuse(asked: _Asked, refused: RequestRefused) -> None:
    if not asked.reply.done():
        asked.reply.set_exception(refused)
        asked.reply.exception()  # nobody may be left to read it
