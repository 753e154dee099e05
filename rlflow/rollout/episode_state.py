"""An episode so far: its exact tokens, segment by segment, and the places it can go on from."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch

from rlflow.errors import EnvironmentContractError
from rlflow.rollout.engine import Completion, joined_routes
from rlflow.rollout.tokenizer import Speech
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
    completion: Completion | None = None  # of a response that is trained in this row
    turn: int | None = None  # of an observation: the turn that it answers
    framed: bool = False  # an observation of messages, in the chat template's markup
    response: int | None = None  # of a response, and of a copy behind the same tokens: its turn


@dataclass(frozen=True)
class Branch:
    """A conversation from which an episode goes on: right after a response, or before any.

    spans: of its row, the first `count` of them. messages: the conversation where it is one,
    without the last response. speech: the assistant's message so far, text observations included.
    last: the last id of the response. tokenizer: of the conversation, with its tools."""

    tokenizer: Any
    spans: list[TokenSpan] = field(default_factory=list)
    count: int = 0
    messages: list[Message] | None = None
    speech: Speech = ()
    last: int = -1


@dataclass
class EpisodeState:
    """An episode so far. here: the conversation that it is in. places: those after each turn.
    rows: the spans of each segment-to-be, one for each branch of the conversations; row: the one
    under way. said: responses in which the policy sampled control tokens, by their texts."""

    here: Branch
    prompt: str = ""  # the episode's own, which `reset` may have changed
    rows: list[list[TokenSpan]] = field(default_factory=lambda: [[]])
    row: int = 0
    said: dict[str, Speech] = field(default_factory=dict)
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

    def __post_init__(self) -> None:
        self._replaced = False
        self._ends: dict[bytes, list[int]] = {}  # digest of the tokens up to a place -> its turns
        self._lengths: set[int] = set()

    @property
    def spans(self) -> list[TokenSpan]:
        """Those of the row under way."""
        return self.rows[self.row]

    def tokens(self) -> list[int]:
        return tokens_of(self.spans)

    @property
    def length(self) -> int:
        return sum(len(span.tokens) for span in self.spans)

    def begin(self, prompt: list[int]) -> None:
        """Puts down the prompt, in place of one that did not fit."""
        self.rows = [[TokenSpan(prompt)]]

    def respond(self, completion: Completion) -> None:
        """Appends a response; `here` is the place after it."""
        turn = len(self.places)
        self.spans.append(TokenSpan(completion.tokens, completion, response=turn))
        self.response_tokens += len(completion.tokens)
        speech = self.here.speech
        if self.here.messages is not None:
            own = self.here.tokenizer.speech(completion.tokens)
            speech = (*speech, *own)
            if any(isinstance(part, int) for part in own):
                self.said[self.here.tokenizer.spoken(own)] = own
        self.here = dataclasses.replace(
            self.here,
            spans=self.spans,
            count=len(self.spans),
            speech=speech,
            last=completion.tokens[-1] if completion.tokens else -1,
        )
        self.places.append(self.here)
        tokens = self.tokens()
        self._lengths.add(len(tokens))
        self._ends.setdefault(_digested(blake2b(digest_size=16), tokens), []).append(turn)

    def replace(self, observations: Mapping[int | None, list[int]]) -> None:
        """Closes the row and starts another, with the observations of some turns exchanged.

        Responses so far are context there; they are trained in the row that sampled them. Raises
        EnvironmentContractError after a fork, whose context is one piece, and for an observation of
        messages, whose markup would be lost."""
        if self.forks:
            raise EnvironmentContractError(MIXED)
        for span in self.spans:
            if span.framed and span.turn in observations:
                raise EnvironmentContractError(FRAMED.format(span.turn))
        spans = [
            dataclasses.replace(
                span,
                tokens=observations.get(span.turn, span.tokens),
                completion=None,
                response=None,
            )
            for span in self.spans
        ]
        if any(span.completion is not None for span in self.spans):  # else it was replaced twice
            self.row += 1
        self.rows[self.row :] = [spans]
        self._replaced = True
        self.here = self.places[-1] = dataclasses.replace(self.here, spans=spans)

    def branch(self, context: list[int], again: int | None) -> tuple[list[int], int]:
        """Goes on in the row that ends with the longest beginning of the context, so that each
        conversation of an agent is one row; where another response follows there already, in a new
        row. again: how many of the tokens stand for what was in view before; None: not known.
        Returns what is to be appended, and how many tokens of it nobody was shown before. Raises
        EnvironmentContractError after `replace`."""
        if self._replaced:
            raise EnvironmentContractError(MIXED)
        place = self._longest_place(context)
        shared = [] if place is None else place.spans[: place.count]
        rest = context[sum(len(span.tokens) for span in shared) :]
        if place is not None and _open(place):
            self.row = next(number for number, row in enumerate(self.rows) if row is place.spans)
            return rest, len(rest)
        self.row = len(self.rows)
        self.rows.append([dataclasses.replace(span, completion=None) for span in shared])
        self.forks += 1
        refed = len(context) - len(rest) if again is None else again
        self.refed_tokens += refed
        return rest, len(context) - refed

    def _longest_place(self, context: list[int]) -> Branch | None:
        """The place after most tokens that the context goes on from; of equal ones, one that
        nothing follows."""
        hasher = blake2b(digest_size=16)
        start = 0
        longest: list[int] = []
        for length in sorted(length for length in self._lengths if length < len(context)):
            digest = _digested(hasher, context[start:length])
            longest = self._ends.get(digest, longest)
            start = length
        places = [self.places[turn] for turn in longest]
        return next(filter(_open, places), places[0] if places else None)

    def segments(self) -> list[Segment]:
        """The training sequences: the rows with a response, else the prompt's."""
        rows = [row for row in self.rows if any(span.completion is not None for span in row)]
        self._settle(rows)
        return [make_segment(row) for row in rows or filter(None, self.rows[:1])]

    def _settle(self, rows: Sequence[list[TokenSpan]]) -> None:
        """Has each response trained in the shortest of the rows that hold it behind the same
        tokens: which of an agent's requests came first must not decide what shares a row."""
        holders: dict[int, list[tuple[int, TokenSpan]]] = {}
        for number, row in enumerate(rows):
            for span in row:
                if span.response is not None:
                    holders.setdefault(span.response, []).append((number, span))
        ranks: dict[int, tuple[int, list[int]]] = {}
        for turn, spans in holders.items():
            if len(spans) > 1:
                for number, _ in spans:
                    if number not in ranks:
                        tokens = tokens_of(rows[number])
                        ranks[number] = (len(tokens), tokens)
                spans.sort(key=lambda pair: ranks[pair[0]])
            completion = next(span.completion for _, span in spans if span.completion is not None)
            for _, span in spans:
                span.completion = None
            number, span = spans[0]
            span.completion = completion
            self.turns[turn].segment = number


def tokens_of(spans: Sequence[TokenSpan]) -> list[int]:
    """The tokens of spans, one behind the other."""
    return [token for span in spans for token in span.tokens]


def _open(place: Branch) -> bool:
    """Whether nothing follows a place in its row."""
    return len(place.spans) == place.count


def _digested(hasher: Any, tokens: Sequence[int]) -> bytes:
    """The digest of all that the hasher was given, these tokens included."""
    hasher.update(array("q", tokens).tobytes())
    return hasher.digest()


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
