"""Requests that a pause ended go on where they were cut off, so that an episode never notices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rlflow.rollout.engine import Completion, Engine, Sampling, joined_routes

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Continued:
    """`generate` of an engine, which `pause("abort")` interrupts without a trace: what was sampled
    before is fed back as part of the prompt, and the rest is sampled by whatever weights are there
    then. Each token keeps its log-prob and version.

    No token is drawn a second time: of those that begin a stop string the second draw would have
    another distribution than its log-prob says. An engine looks for stop strings in what it samples
    itself, so one that the interruption cut in two is looked for here, in no more tokens than it
    can have."""

    engine: Engine
    decode: Decode

    async def generate(
        self, tokens: Sequence[int], sampling: Sampling, request_id: str, priority: int = 0
    ) -> Completion:
        """The whole completion; see `Engine.generate`."""
        whole = Completion([], [], [], "paused")
        seed, parts = None if self.engine.slow_seeds else sampling.seed, list[int]()
        while whole.stop == "paused":
            before = len(whole.tokens)
            room = sampling.max_tokens - before
            cut = before > 0 and _ends_within(self.decode(whole.tokens), sampling.stop)
            limit = min(room, _longest(sampling.stop)) if cut else room
            rest = replace(sampling, max_tokens=limit, seed=seed)
            part = await self.engine.generate([*tokens, *whole.tokens], rest, request_id, priority)
            whole.tokens += part.tokens
            whole.logprobs += part.logprobs
            whole.versions += part.versions
            if part.tokens and part.routes is not None:  # else the rest says them, by newer weights
                most = len(tokens) + len(whole.tokens) - 1
                whole.routes = joined_routes(whole.routes, part.routes, most)
                parts.append(part.routes_version)
            whole.stop = part.stop
            if cut and self._ended(whole, before, sampling.stop):
                whole.stop = "stop"
            elif part.stop == "length" and len(part.tokens) == limit < room:
                whole.stop = "paused"
        whole.routes_version = min(parts, default=-1)
        return whole

    def _ended(self, whole: Completion, before: int, stops: Sequence[str]) -> bool:
        """Whether a stop string is complete with a token from `before` on; what follows that token
        is dropped."""
        start = max(0, before - _longest(stops))
        for end in range(before + 1, len(whole.tokens) + 1):
            text = self.decode(whole.tokens[start:end])
            if any(stop in text for stop in stops):
                for values in (whole.tokens, whole.logprobs, whole.versions):
                    del values[end:]
                return True
        return False


def _ends_within(text: str, stops: Sequence[str]) -> bool:
    """Whether the text may end in the beginning of a stop string; half a character may be one."""
    begins = any(text.endswith(stop[:length]) for stop in stops for length in range(1, len(stop)))
    return begins or (bool(stops) and text.endswith("\ufffd"))


def _longest(stops: Sequence[str]) -> int:
    """Tokens that a stop string can have: a token has a byte or more."""
    return max(len(stop.encode()) for stop in stops)
