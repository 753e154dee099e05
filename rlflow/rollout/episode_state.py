"""An episode so far: its exact tokens, segment by segment, and the places it can go on from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rlflow.errors import EnvironmentContractError
from rlflow.rollout.engine import Completion, joined_routes
from rlflow.types import Message, Segment, Turn

MIXED = (
    "Step.replace: an episode whose conversation was rewritten or branched has no observation of "
    "its own left to replace; set rollout.history=exact, or answer with text."
)
FRAMED = (
    "Step.replace: the observation of turn {} consists of messages, whose chat markup a text in "
    "its place would lose; answer with text where it is to be replaced."
)


@dataclass
class TokenSpan:
    """Tokens of one origin: the prompt, a response (with what its engine said) or an
    observation."""

    tokens: list[int]
    completion: Completion | None = None  # of a response that is trained in this segment
    turn: int | None = None  # of an observation: the turn that it answers
    framed: bool = False  # an observation of messages, in the chat template's markup


@dataclass(frozen=True)
class Branch:
    """A conversation from which an episode goes on: right after a response, or before any.

    spans: of its segment, the first `count` of them. messages: the conversation where it is one,
    without the last response. speech: the assistant's message so far, as shown; text observations
    included. last: the last id of the response. tokenizer: of the conversation, with its tools."""

    tokenizer: Any
    spans: list[TokenSpan] = field(default_factory=list)
    count: int = 0
    messages: list[Message] | None = None
    speech: str = ""
    last: int = -1


@dataclass
class EpisodeState:
    """An episode so far. here: the conversation that it is in. places: those after each turn."""

    here: Branch
    prompt: str = ""  # the episode's own, which `reset` may have changed
    spans: list[TokenSpan] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    places: list[Branch] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    reward: float = 0.0
    rewards: dict[str, float] = field(default_factory=dict)  # by name
    response_tokens: int = 0
    observation_tokens: int = 0
    observations_cut: int = 0
    responses_cut: int = 0
    forks: int = 0
    refed_tokens: int = 0
    cause: str = ""  # where a step failed, and what it was given
    fault: str = ""  # what the policy did, of an episode that cannot be scored for it

    def tokens(self) -> list[int]:
        return [token for span in self.spans for token in span.tokens]

    @property
    def length(self) -> int:
        return sum(len(span.tokens) for span in self.spans)

    @property
    def sampled(self) -> bool:
        """Whether a response is trained in the segment under way."""
        return any(span.completion is not None for span in self.spans)

    def respond(self, completion: Completion, response: str) -> None:
        """Appends a response; `here` is the place after it."""
        self.spans.append(TokenSpan(completion.tokens, completion))
        self.response_tokens += len(completion.tokens)
        self.here = dataclasses.replace(
            self.here,
            spans=self.spans,
            count=len(self.spans),
            speech=self.here.speech + response,
            last=completion.tokens[-1] if completion.tokens else -1,
        )
        self.places.append(self.here)

    def replace(self, observations: Mapping[int | None, list[int]]) -> None:
        """Closes the segment and starts another, with the observations of some turns exchanged.

        Responses so far are context there; they are trained in the segment that sampled them.
        Raises EnvironmentContractError after a fork, whose context is one piece, and for an
        observation of messages, whose markup would be lost."""
        if self.forks:
            raise EnvironmentContractError(MIXED)
        for span in self.spans:
            if span.framed and span.turn in observations:
                raise EnvironmentContractError(FRAMED.format(span.turn))
        if self.sampled:  # else it was replaced twice
            self.segments.append(make_segment(self.spans))
        self.spans = [
            dataclasses.replace(
                span, tokens=observations.get(span.turn, span.tokens), completion=None
            )
            for span in self.spans
        ]
        self.here = self.places[-1] = dataclasses.replace(self.here, spans=self.spans)

    def fork(self, spans: Sequence[TokenSpan], refed: int) -> None:
        """Closes the segment; the next one starts with these spans as context. refed: how many
        tokens stand for what was in view before. Raises EnvironmentContractError after
        `replace`."""
        if len(self.segments) > self.forks:
            raise EnvironmentContractError(MIXED)
        self.segments.append(make_segment(self.spans))
        self.spans = [TokenSpan(span.tokens, turn=span.turn) for span in spans]
        self.forks += 1
        self.refed_tokens += refed


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
