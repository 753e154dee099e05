"""One episode: prompt, responses and observations in turns, as exact tokens."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rlflow.environment import Environment, check_answer, check_step
from rlflow.errors import (
    ConfigError,
    EnvironmentContractError,
    ModelError,
    RolloutError,
    described,
    raised_at,
)
from rlflow.rollout.calls import CallThreads, call, deadline
from rlflow.rollout.engine import Completion, Sampling, joined_routes
from rlflow.rollout.tokenizer import NextTurn, Tokenizer, cut_text
from rlflow.types import Episode, Message, Segment, Step, StopReason, Task, Trajectory, Turn

logger = logging.getLogger(__name__)

Generate = Callable[[Sequence[int], Sampling, str], Awaitable[Completion]]
CALL_S, EPISODE_S = 600.0, 7200.0
"""Default deadlines of a call of the environment and of an episode."""
LONG_TEXT = 50_000
"""Observations above so many characters, some 20 ms of work, are tokenized in a thread."""
SHOWN = 80  # characters of a response in the message about a failed step
COUNTED = ("response_tokens", "observation_tokens", "observations_cut", "responses_cut")
COUNTED_OF_MESSAGES = ("forks", "refed_tokens")
HISTORIES = ("template", "exact")
MIXED = (
    "Step.replace: the chat template rewrites earlier turns of this episode, so that there is no "
    "observation of its own left to replace; set rollout.history=exact, or answer with text."
)
MISTAKES = (EnvironmentContractError, ModelError, ConfigError)
"""Errors of the set-up: they would hit every episode, so they end the collection."""


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of an episode. call_s: of one call of the environment; episode_s: of all of it.
    history: what the policy sees of earlier turns, see `Tokenizer.encode_turn`."""

    max_turns: int
    max_response_tokens: int
    max_total_tokens: int
    max_observation_tokens: int | None
    temperature: float
    chat_template: bool
    call_s: float = CALL_S
    episode_s: float = EPISODE_S
    history: str = "template"

    def __post_init__(self) -> None:
        """Raises ConfigError for a history that is none of HISTORIES."""
        if self.history not in HISTORIES:
            raise ConfigError(
                f"rollout.history: expected {' or '.join(HISTORIES)}, found {self.history!r}."
            )


@dataclass(frozen=True)
class Attempt:
    """An episode to play. request_id: sorts in the order of attempts. number: place in its group.
    id: of its trajectory. temperature: None is training's. priority: of its requests; None: the
    nearer to its end, the earlier."""

    task: Task
    group_id: str
    request_id: str
    seeds: Callable[[int], int]
    number: int = 0
    id: str = ""
    temperature: float | None = None
    priority: int | None = None


@dataclass
class TokenSpan:
    """Tokens of one origin: the prompt, a response (with what its engine said) or an
    observation."""

    tokens: list[int]
    completion: Completion | None = None  # of a response that is trained in this segment
    turn: int | None = None  # of an observation: the turn that it answers


@dataclass
class EpisodeState:
    """An episode so far. messages: the conversation where it is one, without the last response."""

    prompt: str = ""  # the episode's own, which `reset` may have changed
    spans: list[TokenSpan] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    messages: list[Message] | None = None
    speech: str = ""  # the assistant's message so far, as shown; text observations included
    reward: float = 0.0
    rewards: dict[str, float] = field(default_factory=dict)  # by name
    response_tokens: int = 0
    observation_tokens: int = 0
    observations_cut: int = 0
    responses_cut: int = 0
    forks: int = 0
    refed_tokens: int = 0
    cause: str = ""  # where a step failed, and what it was given

    def tokens(self) -> list[int]:
        return [token for span in self.spans for token in span.tokens]

    @property
    def length(self) -> int:
        return sum(len(span.tokens) for span in self.spans)

    def replace(self, observations: Mapping[int | None, list[int]]) -> None:
        """Closes the segment and starts another, with the observations of some turns exchanged.

        Responses so far are context there; they are trained in the segment that sampled them.
        Raises EnvironmentContractError after a fork, whose context is one piece."""
        if self.forks:
            raise EnvironmentContractError(MIXED)
        self.segments.append(make_segment(self.spans))
        self.spans = [
            TokenSpan(observations.get(span.turn, span.tokens), turn=span.turn)
            for span in self.spans
        ]

    def fork(self, refed: int) -> None:
        """Closes the segment; the next one starts with what the chat template shows from now on, of
        which `refed` tokens stand for what was in view before. Raises EnvironmentContractError
        after `replace`."""
        if len(self.segments) > self.forks:
            raise EnvironmentContractError(MIXED)
        self.segments.append(make_segment(self.spans))
        self.spans = []
        self.forks += 1
        self.refed_tokens += refed


class EpisodePlayer:
    """Plays episodes of one environment; everything about an episode is in its EpisodeState."""

    def __init__(
        self,
        environment: Environment,
        tokenizer: Tokenizer,
        limits: EpisodeLimits,
        threads: CallThreads,
    ) -> None:
        self._environment, self._tokenizer = environment, tokenizer
        self._limits, self._threads = limits, threads

    @property
    def call_s(self) -> float:
        """The deadline of a call of the environment."""
        return self._limits.call_s

    async def play(self, attempt: Attempt, generate: Generate) -> Trajectory:
        """The trajectory of one attempt; ABORTED where the environment or the engine raises."""
        state = EpisodeState()
        error = ""
        try:
            async with deadline(self._limits.episode_s, "the episode (rollout.faults.episode_s)"):
                stop = await self._from_reset_to_close(attempt, state, generate)
        except MISTAKES:
            raise
        except Exception as failure:  # noqa: BLE001 -- the episode boundary
            stop, error = StopReason.ABORTED, described(failure) + state.cause
            logger.info("episode %s aborted: %s", attempt.request_id, error)
        return self._trajectory(attempt, state, stop, error)

    async def _from_reset_to_close(
        self, attempt: Attempt, state: EpisodeState, generate: Generate
    ) -> StopReason:
        episode = await self._call("reset", attempt.task)
        check_answer(self._environment, "reset", episode, Episode)
        try:
            stop = await self._turns(attempt, episode, state, generate)
        except BaseException:
            try:
                await self._call("close", episode)
            except Exception as failure:  # noqa: BLE001 -- the first failure is the one to tell
                logger.info("episode %s: close failed too: %r", attempt.request_id, failure)
            raise
        await self._call("close", episode)
        return stop

    async def _turns(
        self, attempt: Attempt, episode: Episode, state: EpisodeState, generate: Generate
    ) -> StopReason:
        limits = self._limits
        self._begin(episode.task, state)
        stop_strings = self._environment.stop
        while True:
            tokens = state.tokens()
            room = limits.max_total_tokens - len(tokens)
            if room <= 0:
                return StopReason.MAX_TOKENS
            sampling = Sampling(
                max_tokens=min(limits.max_response_tokens, room),
                temperature=self._temperature(attempt),
                stop=tuple(stop_strings),
                stop_token_ids=self._tokenizer.eos_ids,
                seed=attempt.seeds(episode.turns),
            )
            started = time.monotonic()
            completion = await generate(tokens, sampling, attempt.request_id)
            step = await self._answer(episode, state, completion, started)
            if completion.stop == "length":  # before `terminated`, which half an answer gets too
                return StopReason.MAX_TOKENS
            if step.terminated:
                return StopReason.TERMINATED
            if episode.turns >= self._max_turns(episode):
                return StopReason.MAX_TURNS
            if not await self._observe(state, step, completion):
                return StopReason.MAX_TOKENS
            stop_strings = self._environment.stop if step.stop is None else step.stop

    def _temperature(self, attempt: Attempt) -> float:
        return self._limits.temperature if attempt.temperature is None else attempt.temperature

    def _max_turns(self, episode: Episode) -> int:
        most = episode.task.most_turns
        return self._limits.max_turns if most is None else min(self._limits.max_turns, most)

    def _begin(self, task: Task, state: EpisodeState) -> None:
        chat = self._limits.chat_template
        state.prompt = _as_text(task.prompt)
        state.spans.append(TokenSpan(self._tokenizer.encode_prompt(task.prompt, chat)))
        if not isinstance(task.prompt, str):
            state.messages = list(task.prompt)
        elif chat:
            state.messages = [{"role": "user", "content": task.prompt}]

    async def _answer(
        self, episode: Episode, state: EpisodeState, completion: Completion, started: float
    ) -> Step:
        """Records the response, passes its text to the environment, and records the answer."""
        if completion.interrupted:
            raise RolloutError(f"the engine ended the request early: it was {completion.stop}.")
        start = state.length
        stop = start + len(completion.tokens)
        state.spans.append(TokenSpan(completion.tokens, completion))
        state.response_tokens += len(completion.tokens)
        response = self._tokenizer.decode(completion.tokens)
        state.speech += response
        turn = Turn(len(state.segments), start, stop, 0.0, time.monotonic() - started, response)
        state.turns.append(turn)
        episode.turns += 1
        episode.cut = completion.stop == "length"
        state.responses_cut += episode.cut
        full = episode.cut or stop >= self._limits.max_total_tokens
        episode.turns_left = 0 if full else max(0, self._max_turns(episode) - episode.turns)
        try:
            step = await self._call("step", episode, response)
        except Exception as failure:
            told = [raised_at(failure), f"the response was {response!r:.{SHOWN}}"]
            state.cause = f" ({'; '.join(filter(None, told))})"
            raise
        turn.duration_s = time.monotonic() - started
        check_step(self._environment, step, len(state.turns) - 1)
        turn.reward = float(step.reward)
        turn.observation = _as_text(step.observation)
        turn.picture = step.picture
        state.reward += turn.reward
        for name, value in step.rewards.items():
            state.rewards[name] = state.rewards.get(name, 0.0) + float(value)
        state.metrics.update({name: float(value) for name, value in step.metrics.items()})
        return step

    async def _observe(self, state: EpisodeState, step: Step, completion: Completion) -> bool:
        """Appends the observation; False if it leaves no room for another response."""
        if step.replace:
            state.replace(
                {turn: self._tokenizer.encode_text(text) for turn, text in step.replace.items()}
            )
        characters = len(_as_text(step.observation))
        if state.messages is not None:
            characters += 4 * state.length  # about: a fork encodes all of them
        if characters > LONG_TEXT:  # the other episodes need the loop
            turn = await asyncio.to_thread(self._next_turn, state, step, completion)
        else:
            turn = self._next_turn(state, step, completion)
        seen = state.length if turn.again is None else 0
        if seen + len(turn.tokens) >= self._limits.max_total_tokens:
            return False
        if turn.again is not None:
            state.fork(turn.again)
        state.spans.append(TokenSpan(turn.tokens, turn=len(state.turns) - 1))
        state.observation_tokens += len(turn.tokens) - (turn.again or 0)
        return True

    def _next_turn(self, state: EpisodeState, step: Step, completion: Completion) -> NextTurn:
        if isinstance(step.observation, str):
            tokens = self._tokenizer.encode_text(step.observation)
            most = self._limits.max_observation_tokens
            if most is not None and len(tokens) > most:
                closing = self._environment.frame[1]
                tokens = cut_text(self._tokenizer, step.observation, closing, most)
                state.observations_cut += 1
            if state.messages is not None:
                state.speech += self._tokenizer.decode(tokens)
            return NextTurn(tokens)
        if state.messages is None:
            raise EnvironmentContractError(
                f"{type(self._environment).__name__}.step: the observation consists of messages, "
                "but the prompt is plain text; make the prompt messages too, or set "
                "rollout.chat_template."
            )
        last, exact = completion.tokens[-1], self._limits.history == "exact"
        end = last if last in self._tokenizer.eos_ids else None
        said = self._tokenizer.without_control(state.speech)  # a fork reads it again, as text
        turn = self._tokenizer.encode_turn(state.messages, said, step.observation, end, exact)
        state.messages += [{"role": "assistant", "content": said}, *step.observation]
        state.speech = ""
        return turn

    async def _call(self, name: str, *arguments: Any) -> Any:
        """The result of an environment's method, within the deadline."""
        what, method = (
            f"{type(self._environment).__name__}.{name}",
            getattr(self._environment, name),
        )
        # A reset that waits for a place must not keep `close` from giving one back
        kind = "reset" if name == "reset" else ""
        return await call(self._threads, method, arguments, self._limits.call_s, what, kind)

    def _trajectory(
        self, attempt: Attempt, state: EpisodeState, stop: StopReason, error: str
    ) -> Trajectory:
        sampled = any(span.completion is not None for span in state.spans)
        # Nothing need follow a rewritten observation
        if sampled or (state.spans and not state.segments):
            state.segments.append(make_segment(state.spans))
        names = COUNTED if state.messages is None else COUNTED + COUNTED_OF_MESSAGES
        counts = {name: float(getattr(state, name)) for name in names}
        return Trajectory(
            task_id=attempt.task.id,
            group_id=attempt.group_id,
            segments=state.segments,
            turns=state.turns,
            reward=state.reward,
            rewards=state.rewards,
            stop=stop,
            metrics={**state.metrics, "turns": float(len(state.turns)), **counts},
            temperature=self._temperature(attempt) or 1.0,  # greedy: log-probs at temperature 1
            prompt=state.prompt,
            error=error,
            attempt=attempt.number,
            id=attempt.id,
        )


def make_segment(spans: Sequence[TokenSpan]) -> Segment:
    """The training sequence of the spans: exactly the tokens that the engine got and sampled."""
    tokens: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    routes = None
    for span in spans:
        count, sampled = len(span.tokens), span.completion
        tokens += span.tokens
        mask += [sampled is not None] * count
        logprobs += sampled.logprobs if sampled else [0.0] * count
        versions += sampled.versions if sampled else [-1] * count
        if sampled:
            routes = joined_routes(routes, sampled.routes, len(tokens) - 1)
    named = [span.completion.routes_version for span in spans if span.completion]
    return Segment(
        torch.tensor(tokens, dtype=torch.int64),
        torch.tensor(mask, dtype=torch.bool),
        torch.tensor(logprobs, dtype=torch.float32),
        torch.tensor(versions, dtype=torch.int64),
        routes,
        min(named, default=-1),
    )


def _as_text(observation: str | list[Message]) -> str:
    if isinstance(observation, str):
        return observation
    return "\n".join(f"{message['role']}: {message['content']}" for message in observation)
