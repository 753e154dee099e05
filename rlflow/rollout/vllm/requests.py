"""Requests on this side of vLLM: who waits, what they stop at, and what becomes of the answers."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlflow.errors import RolloutError
from rlflow.rollout.engine import Completion, Sampling, Stop
from rlflow.rollout.tokenizer import Tokenizer

PROMPT_END = 32
"""Tokens that show how a prompt ends, special ones, which have no text, included."""
STOPS: dict[str, Stop] = {"stop": "stop", "length": "length", "abort": "aborted"}
"""vLLM's words -> ours."""


@dataclass(eq=False)
class EngineRequest:
    """A call of `generate` from its arrival to its end. call: its number in vLLM's process, once it runs. sampled: before that
    call. ended_as: why somebody ended it, if somebody did."""

    tokens: list[int]
    sampling: Sampling
    id: str | None
    priority: int
    future: asyncio.Future[Completion]
    call: int | None = None
    sampled: Completion = field(default_factory=lambda: Completion([], [], [], "aborted"))
    ended_as: Stop | None = None
    task: asyncio.Task[None] | None = None

    @property
    def fed(self) -> list[int]:
        """The prompt of the call."""
        return self.tokens + self.sampled.tokens


class RequestQueue:
    """Requests that wait: the lowest priority number first, then who came first."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, EngineRequest]] = []
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: EngineRequest) -> None:
        """Puts a request behind those of its priority."""
        heapq.heappush(self._heap, (request.priority, next(self._order), request))

    def next(self) -> EngineRequest:
        """Takes out the first one."""
        return heapq.heappop(self._heap)[2]

    def take(self, wanted: Callable[[EngineRequest], bool]) -> list[EngineRequest]:
        """Takes out those that are wanted."""
        taken = [entry for entry in self._heap if wanted(entry[2])]
        self._heap = [entry for entry in self._heap if not wanted(entry[2])]
        heapq.heapify(self._heap)
        return [request for _, _, request in sorted(taken)]

    def requests(self) -> list[EngineRequest]:
        """Those that wait, in no order."""
        return [request for _, _, request in self._heap]


@dataclass
class TokenCounts:
    """Since the start. prefilled: computed in prompts (again after a preemption or new weights: not counted); reused: found in
    vLLM's prefix cache; decoded: sampled."""

    prefilled: int = 0
    reused: int = 0
    decoded: int = 0


@dataclass
class StopTokens:
    """What vLLM's stop strings do not see: one that is a special token's text, as special tokens have no text there."""

    tokenizer: Tokenizer
    vocab: int
    known: dict[tuple[str, ...], tuple[int, ...]] = field(default_factory=dict)

    def of(self, strings: tuple[str, ...]) -> tuple[int, ...]:
        """Ids that end a completion because of the strings. Raises RolloutError for an empty one."""
        if strings not in self.known:
            if any(not string for string in strings):
                raise RolloutError("sampling.stop: a stop string is empty; every completion would end at once.")
            special = {
                token: self.tokenizer.decode([token], skip_special_tokens=False) for token in self.tokenizer.special_ids
            }
            self.known[strings] = tuple(t for t, text in special.items() if text in strings and t < self.vocab)
        return self.known[strings]

    def missing(self, prompt: list[int], sampled: list[int], sampling: Sampling) -> bool:
        """Whether nothing in the sampled tokens is a stop, though vLLM says so: behind a prompt that ends within a character
        vLLM (0.32) looks for stop strings in the prompt too."""
        ids = (*sampling.stop_token_ids, *self.of(sampling.stop))
        if not sampling.stop or any(token in ids for token in sampled[-1:]) or not self._ends_open(prompt):
            return False
        text = self.tokenizer.decode(sampled)
        return not any(string in text for string in sampling.stop)

    def _ends_open(self, tokens: list[int]) -> bool:
        return self.tokenizer.decode(tokens[-PROMPT_END:]).endswith("\ufffd")


def take(request: EngineRequest, reply: Mapping[str, Any], counts: TokenCounts) -> Completion:
    """The request's tokens so far, with those that vLLM's process answered, counted. Raises RolloutError for an end that is
    none."""
    stop = STOPS.get(reply["stop"])
    if stop is None:
        raise RolloutError(f"vLLM: it ended a request with '{reply['stop']}'; expected {', '.join(STOPS)}.")
    counts.prefilled += len(request.fed) - reply["cached"]
    counts.reused += reply["cached"]
    counts.decoded += len(reply["tokens"])
    done = request.sampled
    done.tokens += reply["tokens"]
    done.logprobs += reply["logprobs"]
    done.versions += reply["versions"]
    done.stop = (request.ended_as or stop) if stop == "aborted" else stop
    return done
