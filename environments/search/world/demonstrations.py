"""Demonstrations of the search protocols in worlds that are drawn afresh for each of them, skilful
or not.

Skilful ones look up every fact of a question's chain. The others guess, search or read too little,
or stop after the first hop: behaviour for reinforcement learning to correct. With pages, which is
the protocol of ASearcher, a search shows how articles begin, and a look-up takes four responses: a
search, a thought about its results, the access of a page, and a thought that says what the page
told; once that is said, the page gives way to its first characters.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from rlflow_environments.retrieval.corpus import Passage, make_contents
from rlflow_environments.search.protocols.asearcher import ASearcher
from rlflow_environments.search.protocols.base import Call, Result, Shown
from rlflow_environments.search.protocols.text import format_observation, render_prompt
from rlflow_environments.search.world.articles import Entity, Half, make_half
from rlflow_environments.search.world.prose import RELATIONS, NameSource
from rlflow_environments.search.world.world import Question, excerpt, page_text, page_url, questions

SMALL_WORLD = {"country": 2, "river": 3, "city": 4, "person": 6, "work": 3, "company": 3}
SHARES = {"one_hop": 0.35, "two_hop": 0.5, "comparison": 0.15}
NOTHING = Shown("")
REPEATED = 40  # names at the least, in a row that only repeats some
Part = tuple[str, bool]
"""A text and whether the policy would have written it."""
Turns = list[tuple[str, Shown]]


@dataclass(frozen=True)
class Slips:
    """How often a demonstration goes wrong. guess: answers without a look-up. early: its first
    search names nothing, or, with pages, it answers with what the excerpts show. give_up: answers
    with what the first hop found, where there are two."""

    guess: float = 0.0
    early: float = 0.0
    give_up: float = 0.0


@dataclass(frozen=True)
class Demonstration:
    """turns: (response, what is shown for it); the last shows nothing."""

    prompt: str
    turns: tuple[tuple[str, Shown], ...]

    def segments(self) -> list[list[Part]]:
        """The contexts of the episode, as a rollout makes them: another one begins where a page has
        been read."""
        ends = [place for place, (_, shown) in enumerate(self.turns, 1) if shown.short is not None]
        starts = [0, *(end + 1 for end in ends)]
        return list(map(self._context, starts, [*ends, len(self.turns) - 1]))

    def _context(self, start: int, end: int) -> list[Part]:
        """What the policy has before it when it has written turns `start` to `end`, and wrote
        there: every page that was read before turn `start` in its short form."""
        parts: list[Part] = [(self.prompt, False)]
        for place, (response, shown) in enumerate(self.turns[: end + 1]):
            read = place + 1 < start and shown.short is not None
            parts += [(response, place >= start), (str(shown.short if read else shown.full), False)]
        return parts


def demonstrate(
    generator: random.Random, slips: Slips = Slips(), top_k: int = 3, *, pages: bool = False
) -> Demonstration:
    """One demonstration in a fresh world of the training pool."""
    half = make_half(generator, "train", SMALL_WORLD)
    kind = generator.choices(list(SHARES), list(SHARES.values()))[0]
    question = questions(half, generator, 1, {kind: 1.0})[0]
    searcher = (_Browser if pages else _Searcher)(generator, half, top_k)
    return Demonstration(
        render_prompt("short", question.text), tuple(searcher.turns(question, slips))
    )


class _Searcher:
    """One demonstration in the making."""

    def __init__(self, generator: random.Random, half: Half, top_k: int) -> None:
        self._generator, self._half, self._top_k = generator, half, top_k

    def turns(self, question: Question, slips: Slips) -> Turns:
        fate, finding, turns = self._generator.random(), "", []
        if fate < slips.guess:
            return [_answer("I think I know.", guess(self._generator, question))]
        early = fate < slips.guess + slips.early
        if early and (vague := self._vague(question.chain[0][1])):
            turns += vague
            if len(vague) > 1:
                return turns
        for hop, (subject, relation, found) in enumerate(question.chain):
            keyword = RELATIONS[relation].keyword
            lead = f"I need the {keyword}." if hop == 0 else f"{finding} Next the {keyword}."
            entities = self._found(subject)
            query = f"<search> {subject} {keyword}</search>"
            turns.append((f"<think> {lead}</think>{query}", self._show(query, entities)))
            if hop == 0 and early and (unread := self._unread(entities)):
                return turns + unread
            finding = f"The {keyword} is {found}."
            turns += self._read(subject, finding)
            last = hop > 0 or len(question.chain) == 1
            if not last and self._generator.random() < slips.give_up:
                said = found if question.kind == "two_hop" else guess(self._generator, question)
                return [*turns, _answer(f"{self._concluded(finding)} This will do.".strip(), said)]
        return [*turns, _answer(self._concluded(finding), question.answer)]

    def _found(self, subject: str) -> list[Entity]:
        """What a search for the subject brings: its article, mostly in front, among others that
        name it or that are of its kind, where there are any."""
        generator, right = self._generator, self._half[subject]
        others = [entity for entity in self._half.values() if entity is not right]
        generator.shuffle(others)
        if generator.random() < 0.5:
            others.sort(key=lambda entity: subject not in entity.text)
        else:
            others.sort(key=lambda entity: entity.kind != right.kind)
        found = others[: self._top_k - 1]
        generator.shuffle(found)
        position = 0 if generator.random() < 0.8 else generator.randrange(self._top_k)
        return [*found[:position], right, *found[position:]]

    def _vague(self, relation: str) -> Turns:
        """A search that names nothing, and mostly an answer drawn from what it brings."""
        keyword = RELATIONS[relation].keyword
        entities = self._generator.sample(list(self._half.values()), self._top_k)
        query = f"<search> the {keyword}</search>"
        searched = (f"<think> I need the {keyword}.</think>{query}", self._show(query, entities))
        if self._generator.random() >= 0.7:
            return [searched]
        facts = [name for entity in entities for name in entity.facts.values()]
        return [searched, _answer("This will do.", self._generator.choice(facts))]

    def _show(self, query: str, entities: list[Entity]) -> Shown:
        return Shown(format_observation([_passage(one, one.text) for one in entities]))

    def _unread(self, entities: list[Entity]) -> Turns:
        """How it ends where it does not open a page."""
        return []

    def _read(self, subject: str, finding: str) -> Turns:
        """What lies between a search and the next."""
        return []

    def _concluded(self, finding: str) -> str:
        """What is thought before an answer."""
        return finding


class _Browser(_Searcher):
    """With pages. The observations are those of the protocol itself."""

    def __init__(self, generator: random.Random, half: Half, top_k: int) -> None:
        super().__init__(generator, half, top_k)
        self._seed = generator.randrange(100)
        self._protocol = ASearcher(("search", "access"))

    def _vague(self, relation: str) -> Turns:
        return []

    def _show(self, query: str, entities: list[Entity]) -> Shown:
        shown = [_passage(one, excerpt(one), page_url(self._seed, one)) for one in entities]
        return self._protocol.show([Result(Call("search", (query,)), passages=[shown])])[0]

    def _unread(self, entities: list[Entity]) -> Turns:
        said = self._generator.choice(list(entities[0].facts.values()))
        return [(" This will do.</think>", NOTHING), _answer("", said)]

    def _read(self, subject: str, finding: str) -> Turns:
        entity = self._half[subject]
        url, page = page_url(self._seed, entity), page_text(self._generator, entity)
        opened = self._protocol.show([Result(Call("access", (url,)), pages=[page])])[0]
        return [
            (f" The page of {subject}.</think>", NOTHING),
            (f"<access> {url}</access>", opened),
            (f" {finding}</think>", NOTHING),
        ]

    def _concluded(self, finding: str) -> str:
        return ""


def _passage(entity: Entity, text: str, url: str = "") -> Passage:
    return Passage(entity.name, entity.name, make_contents(entity.name, text), url)


def _answer(thought: str, said: str) -> tuple[str, Shown]:
    thought = f"<think> {thought}</think>" if thought else ""
    return f"{thought}<answer> {said}</answer>", NOTHING


def guess(generator: random.Random, question: Question) -> str:
    """An answer of the right kind that nothing speaks for."""
    if question.kind == "comparison":
        return generator.choice(["yes", "no"])
    names = NameSource(generator, "train")
    kind = RELATIONS[question.chain[-1][1]].object
    patterns = {"person": "{} {}", "river": "{} River", "lake": "Lake {}", "hills": "{} Hills"}
    return patterns.get(kind, "{}").format(names.word(), names.word())


def repeated_names(generator: random.Random) -> tuple[str, str]:
    """(said once, said again in other orders): a few names of one or two words, which a network
    learns copying from.

    Order and number vary, so that only the names themselves tell how they go on."""
    names = NameSource(generator, "train")
    count = generator.randrange(3, REPEATED // 3 + 3)
    drawn = [generator.choice([names.word, names.person])() for _ in range(count)]
    again: list[str] = []
    while len(again) < REPEATED:
        again += generator.sample(drawn, len(drawn))
    return "".join(f" {name}" for name in drawn), "".join(f" {name}" for name in again)
