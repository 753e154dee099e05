"""One episode: prompt, responses and observations in turns, as exact tokens."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rlflow.environment import MAX_REWARD, Environment
from rlflow.errors import ConfigError, EnvironmentContractError, ModelError, RolloutError, described, raised_at
from rlflow.rollout.calls import CallThreads, call, deadline
from rlflow.rollout.engine import Completion, Sampling
from rlflow.rollout.tokenizer import Tokenizer
from rlflow.types import Episode, Message, Segment, Step, StopReason, Task, Trajectory, Turn

logger = logging.getLogger(__name__)

Generate = Callable[[Sequence[int], Sampling, str], Awaitable[Completion]]
CALL_S, EPISODE_S = 600.0, 7200.0
"""Deadlines of a call of the environment and of an episode, by which whoever takes longer counts as hung."""
LONG_TEXT = 50_000
"""Characters of an observation that are tokenized in a thread: some 20 ms, in which most tokenizers let others run."""
SHOWN = 80
"""Characters of a response that a failed step is told of with."""
MISTAKES = (EnvironmentContractError, ModelError, ConfigError)
"""Errors of the set-up: they would hit every episode, so they stop the collection instead of aborting one."""


@dataclass(frozen=True)
class EpisodeLimits:
    """How long an episode may get. Tokens: a response, an observation, the whole episode. call_s: a call of the environment,
    episode_s: the whole episode."""

    max_turns: int
    max_response_tokens: int
    max_total_tokens: int
    max_observation_tokens: int | None
    temperature: float
    chat_template: bool
    call_s: float = CALL_S
    episode_s: float = EPISODE_S


@dataclass(frozen=True)
class TurnSeeds:
    """From the turn to a seed of 63 bits, for an attempt of a group; group ids hold step and task."""

    seed: int
    group_id: str
    attempt: int

    def __call__(self, turn: int) -> int:
        text = f"{self.seed}/{self.group_id}/{self.attempt}/{turn}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class Attempt:
    """Which episode to play. request_id: sorts in the order of the attempts. seeds: one per turn. number: which of its group.
    id: of its trajectory. temperature: None: training's. priority: of its requests; None: the nearer to the end, the earlier."""

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
    """Tokens of one origin: the prompt, a response (with what its engine said) or an observation."""

    tokens: list[int]
    completion: Completion | None = None  # of a response that is trained in this segment
    turn: int | None = None  # of an observation: the turn that it answers


@dataclass
class EpisodeState:
    """What an episode consists of so far. `messages`: the conversation where it is one; the last response is not in
    it."""

    prompt: str = ""  # the episode's own, which `reset` may have changed
    spans: list[TokenSpan] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    messages: list[Message] | None = None
    speech: str = ""  # text of the assistant's message so far, observations that are text included
    reward: float = 0.0
    rewards: dict[str, float] = field(default_factory=dict)  # by name
    response_tokens: int = 0
    observation_tokens: int = 0
    observations_cut: int = 0
    responses_cut: int = 0
    cause: str = ""  # where a step failed, and what it was given

    def tokens(self) -> list[int]:
        return [token for span in self.spans for token in span.tokens]

    def replace(self, observations: dict[int, list[int]]) -> None:
        """Closes the segment and starts another one, with the observations of some turns exchanged. Responses so far
        are context there: they are trained in the segment that they were sampled in."""
        self.segments.append(make_segment(self.spans))
        self.spans = [
            TokenSpan(span.tokens if span.turn is None else observations.get(span.turn, span.tokens), None, span.turn)
            for span in self.spans
        ]


class EpisodePlayer:
    """Plays episodes of one environment; everything about an episode is in its EpisodeState."""

    def __init__(
        self, environment: Environment, tokenizer: Tokenizer, limits: EpisodeLimits, threads: CallThreads
    ) -> None:
        self._environment = environment
        self._tokenizer = tokenizer
        self._limits = limits
        self._threads = threads

    @property
    def call_s(self) -> float:
        """The deadline of a call of the environment."""
        return self._limits.call_s

    async def play(self, attempt: Attempt, generate: Generate) -> Trajectory:
        """The trajectory of one attempt. An exception from the environment or the engine makes it ABORTED."""
        state = EpisodeState()
        error = ""
        try:
            async with deadline(self._limits.episode_s, "the episode (rollout.faults.episode_s)"):
                stop = await self._from_reset_to_close(attempt, state, generate)
        except MISTAKES:
            raise
        except Exception as failure:  # noqa: BLE001 -- the episode boundary: a failure of others must not end the run
            stop, error = StopReason.ABORTED, described(failure) + state.cause
            logger.info("episode %s aborted: %s", attempt.request_id, error)
        return self._trajectory(attempt, state, stop, error)

    async def _from_reset_to_close(self, attempt: Attempt, state: EpisodeState, generate: Generate) -> StopReason:
        episode = await self._call("reset", attempt.task)
        if not isinstance(episode, Episode):
            raise EnvironmentContractError(_wrong_type(self._environment, "reset", "an Episode", episode))
        try:
            stop = await self._turns(attempt, episode, state, generate)
        except BaseException:
            try:
                await self._call("close", episode)
            except Exception as failure:  # noqa: BLE001 -- what went wrong before is what the user must hear of
                logger.info("episode %s: close failed too: %r", attempt.request_id, failure)
            raise
        await self._call("close", episode)
        return stop

    async def _turns(self, attempt: Attempt, episode: Episode, state: EpisodeState, generate: Generate) -> StopReason:
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
            step = await self._answer(episode, state, completion, len(tokens), started)
            if completion.stop == "length":  # first: who answers once says "terminated" of half an answer too
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
        self, episode: Episode, state: EpisodeState, completion: Completion, start: int, started: float
    ) -> Step:
        """Writes the response down, gives its text to the environment, and books what that answered."""
        if completion.interrupted:
            raise RolloutError(f"the engine ended the request before it was complete: it was {completion.stop}.")
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
            place = raised_at(failure)
            state.cause = f" ({place + '; ' if place else ''}the response was {response!r:.{SHOWN}})"
            raise
        turn.duration_s = time.monotonic() - started
        if not isinstance(step, Step):
            raise EnvironmentContractError(_wrong_type(self._environment, "step", "a Step", step))
        named = {f"rewards['{name}']": value for name, value in step.rewards.items()}
        for name, reward in {"reward": step.reward, **named}.items():
            if not abs(reward) <= MAX_REWARD:  # NaN included
                raise EnvironmentContractError(
                    f"{type(self._environment).__name__}.step: expected a finite {name}, found {reward}; at most {MAX_REWARD:g} "
                    "either way."
                )
        if step.replace:
            self._check_replace(step.replace, len(state.turns) - 1)
        turn.reward = float(step.reward)
        turn.observation = _as_text(step.observation)
        state.reward += turn.reward
        for name, value in step.rewards.items():
            state.rewards[name] = state.rewards.get(name, 0.0) + float(value)
        state.metrics.update({name: float(value) for name, value in step.metrics.items()})
        return step

    def _check_replace(self, replace: dict[int, str], answered: int) -> None:
        """Raises EnvironmentContractError for what cannot be replaced: anything but observations of turns before this one."""
        for turn, text in replace.items():
            if isinstance(turn, bool) or not isinstance(turn, int) or not 0 <= turn < answered:
                earlier = f"an earlier turn (0 to {answered - 1})" if answered else "none, as no turn was answered before"
                found = f"{turn!r}"
            elif not isinstance(text, str):
                earlier, found = f"text for turn {turn}", type(text).__name__
            else:
                continue
            raise EnvironmentContractError(
                f"{type(self._environment).__name__}.step: replace: expected {earlier}, found {found}; its keys are turns, "
                "counted from 0, whose observations read differently from now on."
            )

    async def _observe(self, state: EpisodeState, step: Step, completion: Completion) -> bool:
        """Appends the observation; False if it leaves no room for another response."""
        limits = self._limits
        if step.replace:
            state.replace({turn: self._tokenizer.encode_text(text) for turn, text in step.replace.items()})
        if len(_as_text(step.observation)) > LONG_TEXT:  # the other episodes need the loop
            tokens = await asyncio.to_thread(self._observation_tokens, state, step, completion)
        else:
            tokens = self._observation_tokens(state, step, completion)
        if sum(len(span.tokens) for span in state.spans) + len(tokens) >= limits.max_total_tokens:
            return False
        state.spans.append(TokenSpan(tokens, turn=len(state.turns) - 1))
        state.observation_tokens += len(tokens)
        return True

    def _observation_tokens(self, state: EpisodeState, step: Step, completion: Completion) -> list[int]:
        if isinstance(step.observation, str):
            tokens = self._tokenizer.encode_text(step.observation)
            most = self._limits.max_observation_tokens
            if most is not None and len(tokens) > most:
                tokens = self._cut(step.observation, most)
                state.observations_cut += 1
            state.speech += step.observation
            return tokens
        if state.messages is None:
            raise EnvironmentContractError(
                f"{type(self._environment).__name__}.step: the observation consists of messages, but the prompt is "
                "plain text; make the prompt messages too, or set rollout.chat_template."
            )
        last = completion.tokens[-1]
        closing = last if last in self._tokenizer.eos_ids else None
        tokens = self._tokenizer.encode_turn(state.messages, state.speech, step.observation, closing)
        state.messages += [{"role": "assistant", "content": state.speech}, *step.observation]
        state.speech = ""
        return tokens

    def _cut(self, observation: str, most: int) -> list[int]:
        """The first tokens of an observation and, where it ends as the environment's frame does, that end: `most` in all."""
        closing = self._environment.frame[1]
        if not closing or not observation.endswith(closing):
            return self._tokenizer.encode_text(observation)[:most]
        end = self._tokenizer.encode_text(closing)
        return self._tokenizer.encode_text(observation.removesuffix(closing))[: most - len(end)] + end

    async def _call(self, name: str, *arguments: Any) -> Any:
        """The result of an environment's method, within the deadline."""
        what = f"{type(self._environment).__name__}.{name}"
        kind = "reset" if name == "reset" else ""  # one that waits for a place must not keep `close` from giving one back
        return await call(self._threads, getattr(self._environment, name), arguments, self._limits.call_s, what, kind)

    def _trajectory(self, attempt: Attempt, state: EpisodeState, stop: StopReason, error: str) -> Trajectory:
        sampled = any(span.completion is not None for span in state.spans)
        if sampled or (state.spans and not state.segments):  # nothing may follow a rewritten observation
            state.segments.append(make_segment(state.spans))
        counts = {
            "turns": float(len(state.turns)),
            "response_tokens": float(state.response_tokens),
            "observation_tokens": float(state.observation_tokens),
            "observations_cut": float(state.observations_cut),
            "responses_cut": float(state.responses_cut),
        }
        return Trajectory(
            task_id=attempt.task.id,
            group_id=attempt.group_id,
            segments=state.segments,
            turns=state.turns,
            reward=state.reward,
            rewards=state.rewards,
            stop=stop,
            metrics={**state.metrics, **counts},
            temperature=self._temperature(attempt) or 1.0,  # greedy log-probs are those at temperature 1
            prompt=state.prompt,
            error=error,
            attempt=attempt.number,
            id=attempt.id,
        )


def make_segment(spans: Sequence[TokenSpan]) -> Segment:
    """The training sequence of the spans, in order: exactly the tokens that the engine was fed and that it sampled."""
    tokens: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for span in spans:
        count = len(span.tokens)
        sampled = span.completion
        tokens += span.tokens
        mask += [sampled is not None] * count
        logprobs += sampled.logprobs if sampled else [0.0] * count
        versions += sampled.versions if sampled else [-1] * count
    return Segment(
        torch.tensor(tokens, dtype=torch.int64),
        torch.tensor(mask, dtype=torch.bool),
        torch.tensor(logprobs, dtype=torch.float32),
        torch.tensor(versions, dtype=torch.int64),
    )


def _as_text(observation: str | list[Message]) -> str:
    if isinstance(observation, str):
        return observation
    return "\n".join(f"{message['role']}: {message['content']}" for message in observation)


def _wrong_type(environment: Environment, method: str, expected: str, found: object) -> str:
    return f"{type(environment).__name__}.{method}: expected {expected} as its result, found {type(found).__name__}."
