"""Requests that a pause ended go on where they were cut off, so that an episode never notices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from rlflow.rollout.engine import Completion, Engine, Sampling

Decode = Callable[[Sequence[int]], str]


class Continued:
    """`generate` of an engine, which `pause("abort")` interrupts without a trace: what was sampled before is fed back as part of
    the prompt, and the rest is sampled by whatever weights are there then. Each token keeps its log-prob and version."""

    def __init__(self, engine: Engine, decode: Decode) -> None:
        self._engine = engine
        self._decode = decode

    async def generate(
        self, tokens: Sequence[int], sampling: Sampling, request_id: str, priority: int = 0
    ) -> Completion:
        """The whole completion; see `Engine.generate`."""
        whole = Completion([], [], [], "paused")
        while whole.stop == "paused":
            room = sampling.max_tokens - len(whole.tokens)
            rest = dataclasses.replace(sampling, max_tokens=room)
            part = await self._engine.generate([*tokens, *whole.tokens], rest, request_id, priority)
            whole.tokens += part.tokens
            whole.logprobs += part.logprobs
            whole.versions += part.versions
            whole.stop = part.stop
            if part.stop == "paused":
                self._cut_back(whole, sampling)
        return whole

    def _cut_back(self, whole: Completion, sampling: Sampling) -> None:
        """Takes back the last tokens as long as the text ends in the beginning of a stop string: the engine looks for them in
        what it samples itself, and would not find one that lies on both sides of the interruption."""
        while whole.tokens and _ends_within(self._decode(whole.tokens), sampling.stop):
            for values in (whole.tokens, whole.logprobs, whole.versions):
                values.pop()


def _ends_within(text: str, stops: Sequence[str]) -> bool:
    return any(text.endswith(stop[:length]) for stop in stops for length in range(1, len(stop)))
