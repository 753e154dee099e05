"""Questions of one and of two hops composed from the facts of passages, by rule."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.search.own_documents.blanks import blank_of, ordinary_words
from rlflow_environments.search.own_documents.documents import split_sentences
from rlflow_environments.search.own_documents.english import Fact, facts_of, names_in
from rlflow_environments.search.rewards.scoring import normalize_answer


@dataclass(frozen=True)
class Hop:
    """One fact to look up: what a searcher would ask, what it must find, and the row of the passage
    that says so."""

    query: str
    answer: str
    passage: int


@dataclass(frozen=True)
class Candidate:
    """A question, its answer and the way there. kind: which rule or model made it; kinds take
    turns. names: what the question and its facts are about, the answer included."""

    question: str
    answer: str
    kind: str
    hops: tuple[Hop, ...]
    names: frozenset[str]


@dataclass(frozen=True)
class Stated:
    """A fact, and the way to the passage that states it."""

    fact: Fact
    hop: Hop


def find_facts(
    passages: Sequence[Passage], refused: Counter[str], *, blanks: bool = True
) -> list[Stated]:
    """The facts of all passages, in order: those of the table of relations, and for other sentences
    a blank; `refused` counts by reason those that can have none."""
    titles = {passage.title for passage in passages}
    ordinary = ordinary_words(passage.body for passage in passages)
    found: list[Stated] = []
    for row, passage in enumerate(passages):
        for paragraph in passage.body.split("\n"):
            for sentence in split_sentences(paragraph):
                facts = list(facts_of(sentence, passage.title))
                if not facts and blanks:
                    blank = blank_of(sentence, passage.title, titles, ordinary)
                    if isinstance(blank, str):
                        refused[blank] += 1
                    else:
                        facts = [blank]
                found += [Stated(fact, Hop(fact.query, fact.object, row)) for fact in facts]
    return found


def compose(stated: Sequence[Stated], generator: random.Random) -> list[Candidate]:
    """Every fact as a question, and every pair of facts of which the second is about what the first
    states.

    The first of a pair must come with a description of its object, which then stands in the
    second's question for its name.
    """
    single = [_single(statement, generator) for statement in stated]
    about: dict[str, list[Stated]] = {}
    for statement in stated:
        about.setdefault(normalize_answer(statement.fact.subject), []).append(statement)
    pairs = [
        _pair(first, second, generator)
        for first in stated
        if first.fact.description
        for second in about.get(normalize_answer(first.fact.object), [])
        if normalize_answer(second.fact.object) != normalize_answer(first.fact.subject)
    ]
    return single + pairs


def _single(statement: Stated, generator: random.Random) -> Candidate:
    fact = statement.fact
    question = generator.choice(fact.question).replace("{s}", fact.subject)
    return Candidate(
        question,
        fact.object,
        fact.relation,
        (statement.hop,),
        names_of(question, fact.subject, fact.object),
    )


def _pair(first: Stated, second: Stated, generator: random.Random) -> Candidate:
    question = _readable(
        generator.choice(second.fact.question).replace("{s}", first.fact.description)
    )
    names = names_of(question, first.fact.subject, first.fact.object, second.fact.object)
    return Candidate(
        question,
        second.fact.object,
        f"{first.fact.relation} {second.fact.relation}",
        (first.hop, second.hop),
        names,
    )


def _readable(question: str) -> str:
    """The question without a doubled article, and with a capital where its sentence begins."""
    question = re.sub(r"\b([Tt]he) the\b", r"\1", question)
    return re.sub(r'(?<= ")[a-z]', lambda first: first[0].upper(), question)


def names_of(question: str, *further: str) -> frozenset[str]:
    """The normalized names of a question and what else it is about."""
    return frozenset(
        normal for name in (*names_in(question), *further) if (normal := normalize_answer(name))
    )
