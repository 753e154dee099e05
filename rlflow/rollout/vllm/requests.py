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

STOPS: dict[str, Stop] = {"stop": "stop", "length": "length", "abort": "aborted"}
"""vLLM's words -> ours."""


@dataclass(eq=False)
class EngineRequest:
    """A call of `generate` from its arrival to its end. call: its number in vLLM's process, once it runs. ended_as: why somebody
    ended it, where vLLM says that it was aborted."""

    tokens: list[int]
    sampling: Sampling
    id: str | None
    priority: int
    future: asyncio.Future[Completion]
    call: int | None = None
    ended_as: Stop = "aborted"
    task: asyncio.Task[None] | None = None


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


def completion(request: EngineRequest, reply: Mapping[str, Any], counts: TokenCounts) -> Completion:
    """What vLLM's process answered to a request, counted. Raises RolloutError for an end that is none."""
    stop = STOPS.get(reply["stop"])
    if stop is None:
        raise RolloutError(f"vLLM: it ended a request with '{reply['stop']}'; expected {', '.join(STOPS)}.")
    counts.prefilled += len(request.tokens) - reply["cached"]
    counts.reused += reply["cached"]
    counts.decoded += len(reply["tokens"])
    return Completion(
        reply["tokens"], reply["logprobs"], reply["versions"], request.ended_as if stop == "aborted" else stop
    )
