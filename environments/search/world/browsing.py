"""Demonstrations of the ASearcher protocol in a world of excerpts: a search shows how articles
begin, their pages hold the facts.

A look-up takes four responses: a search, a thought about its results, the access of a page, and a
thought that says what the page told; once that is said, the page gives way to its first characters.
The observations are those of the protocol itself.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from rlflow_environments.retrieval.corpus import Passage, make_contents
from rlflow_environments.search.protocols.asearcher import ASearcher
from rlflow_environments.search.protocols.base import Call, Result, Shown
from rlflow_environments.search.protocols.text import render_prompt
from rlflow_environments.search.world.demonstrations import SHARES, SMALL_WORLD, guess, results
from rlflow_environments.search.world.prose import RELATIONS
from rlflow_environments.search.world.world import (
    Entity,
    Half,
    Question,
    excerpt,
    make_half,
    page_text,
    page_url,
    questions,
)

Part = tuple[str, bool]
"""A text and whether the policy would have written it."""


@dataclass(frozen=True)
class Haste:
    """How often a demonstration goes wrong. guess: answers without a look-up. unread: answers with
    what the excerpts show, without a page. give_up: answers with what the first page told, where
    there are two."""

    guess: float = 0.0
    unread: float = 0.0
    give_up: float = 0.0


HASTY = Haste(guess=0.15, unread=0.3, give_up=0.6)


@dataclass(frozen=True)
class Browsed:
    """turns: (response, what is shown for it); the last shows nothing."""

    prompt: str
    turns: tuple[tuple[str, Shown], ...]

    def context(self, upto: int, start: int = 0) -> list[Part]:
        """What the policy has before it when it has written turns `start` to `upto`, and wrote
        there: every page that was read before turn `start` in its short form."""
        parts: list[Part] = [(self.prompt, False)]
        for number, (response, shown) in enumerate(self.turns[: upto + 1]):
            read = number + 1 < start and shown.short is not None
            parts += [
                (response, number >= start),
                (str(shown.short if read else shown.full), False),
            ]
        return parts

    def segments(self) -> list[list[Part]]:
        """The contexts of the episode, as a rollout makes them: another one begins where a page has
        been read."""
        ends = [
            number + 1 for number, (_, shown) in enumerate(self.turns) if shown.short is not None
        ]
        starts = [0, *(end + 1 for end in ends)]
        return [
            self.context(end, start)
            for start, end in zip(starts, [*ends, len(self.turns) - 1], strict=True)
        ]


def browse(generator: random.Random, haste: Haste = Haste(), top_k: int = 3) -> Browsed:
    """One demonstration in a fresh world of the training pool."""
    half = make_half(generator, "train", SMALL_WORLD)
    kind = generator.choices(list(SHARES), list(SHARES.values()))[0]
    question = questions(half, generator, 1, {kind: 1.0})[0]
    return Browsed(
        render_prompt("short", question.text),
        tuple(_Tour(generator, half, top_k).turns(question, haste)),
    )


class _Tour:
    """One demonstration in the making."""

    def __init__(self, generator: random.Random, half: Half, top_k: int) -> None:
        self._generator, self._half, self._top_k = generator, half, top_k
        self._seed = generator.randrange(100)
        self._protocol = ASearcher(("search", "access"))

    def turns(self, question: Question, haste: Haste) -> list[tuple[str, Shown]]:
        fate, finding, turns = self._generator.random(), "", []
        if fate < haste.guess:
            return [_answer("I think I know.", guess(self._generator, question))]
        for hop, (subject, relation, found) in enumerate(question.chain):
            keyword = RELATIONS[relation].keyword
            lead = f"I need the {keyword}." if hop == 0 else f"{finding} Next the {keyword}."
            entities = results(self._generator, self._half, subject, self._top_k)
            query = Call("search", (f"{subject} {keyword}",))
            turns.append(
                (
                    f"<think> {lead}</think><search> {query.inputs[0]}</search>",
                    self._found(query, entities),
                )
            )
            if hop == 0 and fate < haste.guess + haste.unread:
                said = self._generator.choice(list(entities[0].facts.values()))
                return [*turns, (" This will do.</think>", Shown("")), _answer("", said)]
            turns.append((f" The page of {subject}.</think>", Shown("")))
            page = Call("access", (page_url(self._seed, self._half.entities[subject]),))
            turns.append(
                (
                    f"<access> {page.inputs[0]}</access>",
                    self._opened(page, self._half.entities[subject]),
                )
            )
            finding = f"The {keyword} is {found}."
            turns.append((f" {finding}</think>", Shown("")))
            if hop == 0 and len(question.chain) > 1 and self._generator.random() < haste.give_up:
                said = found if question.kind == "two_hop" else guess(self._generator, question)
                return [*turns, _answer("This will do.", said)]
        return [*turns, _answer("", question.answer)]

    def _found(self, call: Call, entities: list[Entity]) -> Shown:
        passages = [
            Passage(
                one.name, one.name, make_contents(one.name, excerpt(one)), page_url(self._seed, one)
            )
            for one in entities
        ]
        return self._protocol.show([Result(call, passages=[passages])])[0]

    def _opened(self, call: Call, entity: Entity) -> Shown:
        return self._protocol.show([Result(call, pages=[page_text(self._generator, entity)])])[0]


def _answer(thought: str, said: str) -> tuple[str, Shown]:
    return (f"<think> {thought}</think>" if thought else "") + f"<answer> {said}</answer>", Shown(
        ""
    )
