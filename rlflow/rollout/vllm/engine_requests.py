"""Requests on this side of vLLM, and what they stop at."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from rlflow.errors import RolloutError
from rlflow.models.huggingface import read_config
from rlflow.rollout.engine import Completion, Sampling, Stop, joined_routes
from rlflow.rollout.tokenizer import Tokenizer
from rlflow.rollout.vllm.completions import Sent

COLDEST = 0.01  # vLLM takes a temperature between 0 and this as this
PROMPT_END = 32
"""Tokens that show how a prompt ends, special ones, which have no text, included."""


@dataclass(eq=False)
class EngineRequest:
    """A call of `generate` from its arrival to its end. call: what was sent, and task: what waits
    for the reply, both once it runs. sampled: before that call. ended_as: why somebody ended it, if
    somebody did."""

    tokens: list[int]
    sampling: Sampling
    id: str | None
    priority: int
    future: asyncio.Future[Completion]
    call: Sent = field(init=False)
    task: asyncio.Task[None] = field(init=False)
    sampled: Completion = field(default_factory=lambda: Completion([], [], [], "aborted"))
    ended_as: Stop | None = None

    @property
    def fed(self) -> list[int]:
        """The prompt of the call."""
        return self.tokens + self.sampled.tokens

    def take(self, part: Completion) -> Completion:
        """Its tokens so far, with those of a part."""
        done = self.sampled
        done.tokens += part.tokens
        done.logprobs += part.logprobs
        done.versions += part.versions
        most = len(self.tokens) + len(done.tokens) - 1
        done.routes = joined_routes(done.routes, part.routes, most)
        done.stop = (self.ended_as or part.stop) if part.stop == "aborted" else part.stop
        return done

    def end(self, outcome: Completion | RolloutError) -> None:
        """Answers who asked, unless that was done."""
        if self.future.done():
            return
        if isinstance(outcome, Completion):
            self.future.set_result(outcome)
        else:
            self.future.set_exception(outcome)


@dataclass
class TokenCounts:
    """Since the start. prefilled: computed in prompts (again after a preemption or new weights: not
    counted); reused: found in vLLM's prefix cache; decoded: sampled."""

    prefilled: int = 0
    reused: int = 0
    decoded: int = 0


@dataclass
class StopTokens:
    """What vLLM's stop strings do not see: one that is a special token's text, as special tokens
    have no text there. given: the tokenizer; none: that of the model's directory."""

    path: Path
    given: Tokenizer | None
    vocab: int
    known: dict[tuple[str, ...], tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return self.given or Tokenizer.from_pretrained(self.path)

    def of(self, strings: tuple[str, ...]) -> tuple[int, ...]:
        """Ids that end a completion because of the strings. Raises RolloutError for an empty
        one."""
        if strings and strings not in self.known:
            if any(not string for string in strings):
                raise RolloutError(
                    "sampling.stop: a stop string is empty; every completion would end at once."
                )
            special = {
                token: self.tokenizer.decode([token], skip_special_tokens=False)
                for token in self.tokenizer.special_ids
            }
            self.known[strings] = tuple(
                t for t, text in special.items() if text in strings and t < self.vocab
            )
        return self.known[strings] if strings else ()

    def missing(self, prompt: list[int], sampled: list[int], sampling: Sampling) -> bool:
        """Whether nothing in the sampled tokens is a stop, though vLLM says so: behind a prompt
        that ends within a character vLLM (0.32) looks for stop strings in the prompt too."""
        ids = (*sampling.stop_token_ids, *self.of(sampling.stop))
        if not sampling.stop or any(token in ids for token in sampled[-1:]):
            return False
        if not self.tokenizer.decode(prompt[-PROMPT_END:]).endswith("\ufffd"):
            return False
        text = self.tokenizer.decode(sampled)
        return not any(string in text for string in sampling.stop)


def most_tokens(path: str | Path, max_tokens: int | None) -> int | None:
    """Of a prompt and its completion together: the lower of `max_tokens` and the model's positions;
    None where neither is known."""
    limits = [max_tokens, read_config(path).get("max_position_embeddings")]
    return min((int(limit) for limit in limits if limit is not None), default=None)
