"""One episode: prompt, responses and observations in turns, as exact tokens."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rlflow.environment import (
    Environment,
    SaidTokens,
    check_episode,
    check_fields,
    check_step,
    last_step,
    most_turns,
)
from rlflow.errors import (
    ConfigError,
    EnvironmentContractError,
    ModelError,
    PolicyError,
    RolloutError,
    described,
    raised_at,
)
from rlflow.net.calls import CallThreads, call, deadline
from rlflow.rollout.engine import Completion, Sampling
from rlflow.rollout.episode_state import Branch, EpisodeState, TokenSpan, tokens_of
from rlflow.rollout.tokenizer import NextTurn, Tokenizer, as_messages, cut_text, token_texts
from rlflow.types import Episode, Message, Observation, Step, StopReason, Task, Trajectory, Turn

logger = logging.getLogger(__name__)
T = TypeVar("T")

Generate = Callable[[Sequence[int], Sampling, str], Awaitable[Completion]]
CALL_S, EPISODE_S = 600.0, 7200.0
"""Default deadlines of a call of the environment and of an episode."""
LONG_TEXT = 50_000
"""Texts above so many characters, some 20 ms of work, are tokenized in a thread."""
SHOWN = 80  # characters of a response in the message about a failed step
COUNTED = ("response_tokens", "observation_tokens", "observations_cut", "responses_cut")
COUNTED_OF_MESSAGES = ("forks", "refed_tokens")
HISTORIES = ("template", "exact")
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


@dataclass(eq=False)
class EpisodePlayer:
    """Plays episodes of one environment; everything about an episode is in its EpisodeState."""

    environment: Environment
    tokenizer: Tokenizer
    limits: EpisodeLimits
    threads: CallThreads

    async def play(self, attempt: Attempt, generate: Generate) -> Trajectory:
        """The trajectory of one attempt; ABORTED where the environment or the engine raises."""
        state = EpisodeState(Branch(self.tokenizer))
        error = ""
        try:
            async with deadline(self.limits.episode_s, "the episode (rollout.faults.episode_s)"):
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
        check_episode(self.environment, episode)
        if episode.opening is not None:
            check_fields(self.environment, "reset: opening", episode.opening)
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
        limits = self.limits
        step = replace(episode.opening or Step(), observation=episode.task.prompt)
        while True:
            while not await self._fits(episode, state, step):
                other = await self._answer_of("overflow", state, episode)
                if other is None and episode.unshown is not None:
                    raise episode.unshown
                if other is not None:
                    self._take(state, other)
                if other is None or other.terminated:
                    return StopReason.TERMINATED if episode.unshown else StopReason.MAX_TOKENS
                step = other
            tokens = state.tokens()
            most = min(limits.max_response_tokens, limits.max_total_tokens - len(tokens))
            sampling = Sampling(
                max_tokens=min(most, step.max_tokens or most),
                temperature=self._temperature(attempt),
                stop=tuple(self.environment.stop if step.stop is None else step.stop),
                stop_token_ids=self.tokenizer.eos_ids,
                seed=attempt.seeds(episode.turns),
            )
            started = time.monotonic()
            completion = await generate(tokens, sampling, attempt.request_id)
            # Where the environment asked for fewer, it goes on
            full = completion.stop == "length" and sampling.max_tokens == most
            step = await self._answer(episode, state, completion, full, started)
            if full:  # before `terminated`, which half an answer gets too
                return StopReason.MAX_TOKENS
            if step.terminated:
                return StopReason.TERMINATED
            if episode.turns >= self._max_turns(episode):
                return StopReason.MAX_TURNS

    def _temperature(self, attempt: Attempt) -> float:
        return self.limits.temperature if attempt.temperature is None else attempt.temperature

    def _max_turns(self, episode: Episode) -> int:
        return most_turns(self.environment, episode.task, self.limits.max_turns)

    async def _fits(self, episode: Episode, state: EpisodeState, step: Step) -> bool:
        """Appends the prompt or observation; False if the policy cannot answer it."""
        episode.unshown = None
        try:
            return await (self._observe if state.turns else self._begin)(state, step)
        except (EnvironmentContractError, ModelError, RolloutError) as problem:
            own = step.tools is None and not step.template_options
            if isinstance(problem, ModelError) and own:
                raise
            episode.unshown = problem
            return False

    async def _begin(self, state: EpisodeState, step: Step) -> bool:
        """Puts down the prompt; False if it leaves no room for a response."""
        state.prompt = _as_text(step.observation)
        prompt = functools.partial(self._prompt, step.observation, step)
        tokens, state.here = await self._beside(len(state.prompt), prompt)
        most = self.limits.max_total_tokens
        state.begin(tokens[:most])  # what is scored has no longer rows
        return len(tokens) < most

    async def _beside(self, characters: int, work: Callable[[], T]) -> T:
        """What the work on so many characters returns: out of a thread where they are many, as
        the other episodes need the loop. Not out of asyncio's, where agents may wait."""
        if characters <= LONG_TEXT:
            return work()
        return await self.threads.run(work, self.limits.call_s, "tokenizing", "tokenizing")

    def _prompt(self, prompt: Observation, step: Step) -> tuple[list[int], Branch]:
        """The ids of a conversation's prompt, and the place in front of its first response. step:
        the conversation's tools, and options of the chat template."""
        chat = self.limits.chat_template
        tokenizer = self.tokenizer
        if step.template_options:
            tokenizer = tokenizer.with_options(step.template_options)
        if step.tools is not None:
            tokenizer = tokenizer.with_tools(step.tools)
        talks = chat or not isinstance(prompt, str)
        messages = list(as_messages(prompt)) if talks else None
        return tokenizer.encode_prompt(prompt, chat), Branch(tokenizer, messages=messages)

    async def _answer(
        self,
        episode: Episode,
        state: EpisodeState,
        completion: Completion,
        full: bool,
        started: float,
    ) -> Step:
        """Records the response, passes its text to the environment, and records the answer. full:
        a limit of the run cut it."""
        if completion.interrupted:
            raise RolloutError(f"the engine ended the request early: it was {completion.stop}.")
        start = state.length
        stop = start + len(completion.tokens)
        response = self.tokenizer.response_text(completion.tokens)
        state.respond(completion)
        turn = Turn(state.row, start, stop, 0.0, time.monotonic() - started, response)
        state.turns.append(turn)
        episode.turns += 1
        episode.cut = completion.stop == "length"
        texts = functools.partial(token_texts, self.tokenizer, completion.tokens)
        calls = state.here.tokenizer.call_reader
        episode.sampled = SaidTokens(start, completion.logprobs, texts, calls)
        state.responses_cut += episode.cut
        full = full or stop >= self.limits.max_total_tokens
        episode.turns_left = 0 if full else max(0, self._max_turns(episode) - episode.turns)
        try:
            step = await self._answer_of("step", state, episode, response)
        except Exception as failure:
            told = [raised_at(failure), f"the response was {response!r:.{SHOWN}}"]
            state.cause = f" ({'; '.join(filter(None, told))})"
            raise
        took_s = time.monotonic() - started
        self._take(state, step)
        turn.duration_s = max(0.0, took_s - step.waited_s)
        return step

    def _take(self, state: EpisodeState, step: Step) -> None:
        """Records what a step says of the last response and of the episode."""
        check_step(self.environment, step, len(state.turns) - 1)
        for turn in state.turns[-1:]:  # none where the prompt was too long
            turn.reward += float(step.reward)
            turn.observation = _as_text(step.observation)
            turn.picture = step.picture
        state.reward += float(step.reward)
        for name, value in step.rewards.items():
            state.rewards[name] = state.rewards.get(name, 0.0) + float(value)
        state.metrics.update({name: float(value) for name, value in step.metrics.items()})

    async def _observe(self, state: EpisodeState, step: Step) -> bool:
        """Appends the observation; False if it leaves no room for another response."""
        if step.replace:
            state.replace(
                {turn: self.tokenizer.encode_text(text) for turn, text in step.replace.items()}
            )
        characters = len(_as_text(step.observation))
        if state.here.messages is not None:
            characters += 4 * state.length  # about: a fork encodes all of them
        last = len(state.places) - 1
        after = last if step.after is None else step.after
        next_turn = functools.partial(self._next_turn, state, step, after)
        turn, place = await self._beside(characters, next_turn)
        seen = [] if turn.again is not None else tokens_of(place.spans[: place.count])
        if len(seen) + len(turn.tokens) >= self.limits.max_total_tokens:
            return False
        tokens = turn.tokens
        fresh = len(tokens)
        if turn.again is not None or after != last:
            tokens, fresh = state.branch([*seen, *tokens], turn.again)
        state.here = place
        text = isinstance(step.observation, str)
        state.spans.append(TokenSpan(tokens, turn=len(state.turns) - 1, framed=not text))
        state.observation_tokens += fresh
        return True

    def _next_turn(self, state: EpisodeState, step: Step, after: int) -> tuple[NextTurn, Branch]:
        """The ids in front of the next response, and the place there."""
        if after < 0:
            tokens, place = self._prompt(self._recognised(state, step.observation), step)
            return NextTurn(tokens), place
        place = state.places[after]
        if isinstance(step.observation, str):
            tokens = self.tokenizer.encode_text(step.observation)
            most = self.limits.max_observation_tokens
            if most is not None and len(tokens) > most:
                closing = self.environment.frame[1]
                tokens = cut_text(self.tokenizer, step.observation, closing, most)
                state.observations_cut += 1
            if place.messages is not None:
                place = replace(place, speech=(*place.speech, self.tokenizer.decode(tokens)))
            return NextTurn(tokens), place
        if place.messages is None:
            raise EnvironmentContractError(
                f"{type(self.environment).__name__}.step: the observation consists of messages, "
                "but the prompt is plain text; make the prompt messages too, or set "
                "rollout.chat_template."
            )
        end = place.last if place.last in self.tokenizer.eos_ids else None
        said = self.tokenizer.own_words(place.speech)  # a fork reads it again
        answer = self._recognised(state, step.observation)
        exact = self.limits.history == "exact"
        turn = place.tokenizer.encode_turn(place.messages, said, answer, end, exact)
        if turn.again is not None:
            seen = tokens_of(place.spans[: place.count])
            if turn.tokens[: len(seen)] == seen:  # rewritten to the same ids
                turn = NextTurn(turn.tokens[len(seen) :])
        messages = [*place.messages, {"role": "assistant", "content": said}, *answer]
        return turn, replace(place, messages=messages, speech=())

    def _recognised(self, state: EpisodeState, observation: Observation) -> Any:
        """The observation, in which the assistant's messages that the policy said in this episode
        keep the control tokens that it sampled."""
        if isinstance(observation, str) or not state.said:
            return observation
        return [
            {**message, "content": self.tokenizer.recognise(message["content"], state.said)}
            if message["role"] == "assistant"
            else message
            for message in observation
        ]

    async def _answer_of(self, name: str, state: EpisodeState, *arguments: Any) -> Any:
        """The step of a method that answers the policy; its last one where the policy made the
        episode impossible to score."""
        try:
            return await self._call(name, *arguments)
        except PolicyError as fault:
            state.fault = described(fault)
            return last_step(self.environment, fault, state.metrics)

    async def _call(self, name: str, *arguments: Any) -> Any:
        """The result of an environment's method, within the deadline."""
        what = f"{type(self.environment).__name__}.{name}"
        method = getattr(self.environment, name)
        # A reset that waits for a place must not keep `close` from giving one back
        kind, late = ("reset", self._close_late) if name == "reset" else ("", None)
        return await call(self.threads, method, arguments, self.limits.call_s, what, kind, late)

    def _close_late(self, episode: Any) -> None:
        """Closes an episode that came after its deadline."""
        if isinstance(episode, Episode):
            self._closing = asyncio.ensure_future(self._call("close", episode))

    def _trajectory(
        self, attempt: Attempt, state: EpisodeState, stop: StopReason, error: str
    ) -> Trajectory:
        segments = state.segments()  # of rows: nothing need follow a rewritten observation
        talks = state.here.messages is not None or state.forks
        names = COUNTED + COUNTED_OF_MESSAGES if talks else COUNTED
        counts = {name: float(getattr(state, name)) for name in names}
        return Trajectory(
            task_id=attempt.task.id,
            group_id=attempt.group_id,
            segments=segments,
            turns=state.turns,
            reward=state.reward,
            rewards=state.rewards,
            stop=stop,
            metrics={**state.metrics, "turns": float(len(state.turns)), **counts},
            temperature=self._temperature(attempt) or 1.0,  # greedy: log-probs at temperature 1
            prompt=state.prompt,
            error=error or state.fault,
            attempt=attempt.number,
            id=attempt.id,
        )


def _as_text(observation: str | list[Message]) -> str:
    if isinstance(observation, str):
        return observation
    return "\n".join(f"{message['role']}: {message['content']}" for message in observation)
