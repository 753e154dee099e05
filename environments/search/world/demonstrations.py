"""Demonstrations of the search protocol in worlds that are drawn afresh for each of them, skilful
or clumsy.

A demonstration is a prompt and turns of (response, observation). Skilful ones look up every fact of
a question's chain. Clumsy ones guess, search without naming anything, or stop after the first hop:
behaviour for reinforcement learning to correct.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from rlflow_environments.retrieval.corpus import Passage, make_contents
from rlflow_environments.search.protocols.text import format_observation, render_prompt
from rlflow_environments.search.world.names import NameSource
from rlflow_environments.search.world.prose import RELATIONS
from rlflow_environments.search.world.world import Entity, Half, Question, make_half, questions

SMALL_WORLD = {"country": 2, "river": 3, "city": 4, "person": 6, "work": 3, "company": 3}
SHARES = {"one_hop": 0.35, "two_hop": 0.5, "comparison": 0.15}


@dataclass(frozen=True)
class Clumsiness:
    """How often a demonstration goes wrong. guess: answers without a search. vague: its first
    search names nothing. give_up: answers with what the first hop found, where there are two."""

    guess: float = 0.0
    vague: float = 0.0
    give_up: float = 0.0


@dataclass(frozen=True)
class Demonstration:
    prompt: str
    turns: tuple[tuple[str, str], ...]  # (response, observation); the last observation is empty


def demonstrate(
    generator: random.Random, clumsiness: Clumsiness = Clumsiness(), top_k: int = 3
) -> Demonstration:
    """One demonstration in a fresh world of the training pool."""
    half = make_half(generator, "train", SMALL_WORLD)
    kind = generator.choices(list(SHARES), list(SHARES.values()))[0]
    question = questions(half, generator, 1, {kind: 1.0})[0]
    turns = _turns(generator, half, question, clumsiness, top_k)
    return Demonstration(render_prompt("short", question.text), tuple(turns))


def _turns(
    generator: random.Random, half: Half, question: Question, clumsiness: Clumsiness, top_k: int
) -> list[tuple[str, str]]:
    fate = generator.random()
    if fate < clumsiness.guess:
        return [
            (f"<think> I think I know.</think><answer> {guess(generator, question)}</answer>", "")
        ]
    turns: list[tuple[str, str]] = []
    finding = ""
    if fate < clumsiness.guess + clumsiness.vague:
        relation = RELATIONS[question.chain[0][1]]
        passages = generator.sample(list(half.entities.values()), top_k)
        query = f"<search> the {relation.keyword}</search>"
        turns.append((f"<think> I need the {relation.keyword}.</think>{query}", _observe(passages)))
        if generator.random() < 0.7:
            answer = generator.choice(
                [name for entity in passages for name in entity.facts.values()]
            )
            return [*turns, (f"<think> This will do.</think><answer> {answer}</answer>", "")]
    for hop, (subject, relation, found) in enumerate(question.chain):
        keyword = RELATIONS[relation].keyword
        lead = f"I need the {keyword}." if hop == 0 else f"{finding} Next the {keyword}."
        observation = _observe(results(generator, half, subject, top_k))
        turns.append((f"<think> {lead}</think><search> {subject} {keyword}</search>", observation))
        finding = f"The {keyword} is {found}."
        if hop == 0 and len(question.chain) > 1 and generator.random() < clumsiness.give_up:
            answer = found if question.kind == "two_hop" else guess(generator, question)
            return [
                *turns,
                (f"<think> {finding} This will do.</think><answer> {answer}</answer>", ""),
            ]
    return [*turns, (f"<think> {finding}</think><answer> {question.answer}</answer>", "")]


def guess(generator: random.Random, question: Question) -> str:
    """An answer of the right kind that nothing speaks for."""
    if question.kind == "comparison":
        return generator.choice(["yes", "no"])
    names = NameSource(generator, "train")
    kind = RELATIONS[question.chain[-1][1]].object
    patterns = {"person": "{} {}", "river": "{} River", "lake": "Lake {}", "hills": "{} Hills"}
    return patterns.get(kind, "{}").format(names.word(), names.word())


def results(generator: random.Random, half: Half, subject: str, top_k: int) -> list[Entity]:
    """What a search for the subject brings: its article, mostly in front, among others that name it
    or that are of its kind, where there are any."""
    right = half.entities[subject]
    others = [entity for entity in half.entities.values() if entity is not right]
    generator.shuffle(others)
    if generator.random() < 0.5:
        others.sort(key=lambda entity: subject not in entity.text)
    else:
        others.sort(key=lambda entity: entity.kind != right.kind)
    found = others[: top_k - 1]
    generator.shuffle(found)
    position = 0 if generator.random() < 0.8 else generator.randrange(top_k)
    return [*found[:position], right, *found[position:]]


def _observe(entities: list[Entity]) -> str:
    passages = [
        Passage(entity.name, entity.name, make_contents(entity.name, entity.text), "")
        for entity in entities
    ]
    return format_observation(passages)


def repeated_names(generator: random.Random, most_words: int = 40) -> tuple[str, str]:
    """(said once, said again in other orders): a few names of one or two words, which a network
    learns copying from.

    Order and number vary, so that only the names themselves tell how they go on."""
    names = NameSource(generator, "train")
    drawn = [
        generator.choice([names.word, names.person])()
        for _ in range(generator.randrange(3, most_words // 3 + 3))
    ]
    again: list[str] = []
    while len(again) < most_words:
        again += generator.sample(drawn, len(drawn))
    return "".join(f" {name}" for name in drawn), "".join(f" {name}" for name in again)
