"""A reader of the fictional encyclopedia that knows its sentences but none of its data: the oracle of the world's tests.

It finds facts in the text of articles and answers questions by looking facts up, step by step, as a perfect agent would.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping

from rlflow_environments.search.world.prose import COMPARISONS, PRONOUNS, RELATIONS

NAME = r"((?:The )?[A-Z][a-z]+(?: [A-Z][a-z]+)*)"
SUBJECT = "@"
Facts = dict[tuple[str, str], set[str]]
"""(subject, relation) -> every object that an article about the subject states."""


def read_facts(articles: Mapping[str, str]) -> Facts:
    """All facts that the articles (title -> text) state about their own subjects."""
    facts: Facts = {}
    for title, text in articles.items():
        for relation, found in _facts_in(title, text):
            facts.setdefault((title, relation), set()).add(found)
    return facts


def _facts_in(title: str, text: str) -> Iterator[tuple[str, str]]:
    spoken_of = text.replace(title, SUBJECT)
    for relation, pattern in _patterns():
        for match in pattern.finditer(spoken_of):
            yield relation, match[1]


@functools.cache
def _patterns() -> list[tuple[str, re.Pattern[str]]]:
    """(relation, sentence that states it) for every phrasing, by name and by pronoun."""
    patterns = []
    for relation in RELATIONS.values():
        for sentence in relation.sentences:
            for spoken in {
                sentence,
                *(_retold(sentence, pronoun) for pronoun in PRONOUNS[relation.subject]),
            }:
                stated = re.escape(spoken.replace("{s}", SUBJECT)).replace(r"\{o\}", NAME)
                patterns.append((relation.name, re.compile(rf"(?:^|(?<=[.!?] )){stated}(?=$| )")))
    return patterns


def _retold(sentence: str, pronoun: str) -> str:
    """The sentence about "it", "she", "the town" instead of the name."""
    if sentence.startswith(("The {s} ", "{s} ")):
        return pronoun[0].upper() + pronoun[1:] + " " + sentence.split("{s} ", 1)[1]
    return sentence.replace(", the {s} ", f", {pronoun} ").replace(", {s} ", f", {pronoun} ")


def answers(question: str, facts: Facts) -> set[str]:
    """Every answer to the question that the facts give; one, where question and facts are unambiguous."""
    found = {
        obj for subject, relation in _asked(question) for obj in _objects(subject, relation, facts)
    }
    return found | set(_compared(question, facts))


def _asked(question: str) -> Iterator[tuple[str, str]]:
    """(description of the subject, relation) of every reading of the question."""
    for relation in RELATIONS.values():
        for form in relation.questions:
            if match := _fullmatch(form, question):
                yield match[1], relation.name


def _subjects(description: str, facts: Facts) -> set[str]:
    """The entities that a name, or a description such as "the teacher of X", stands for."""
    name = description.removeprefix("the ")
    found = {name} if any(subject == name for subject, _ in facts) else set()
    for relation in RELATIONS.values():
        for form in relation.descriptions:
            if match := _fullmatch(form, description):
                found |= _objects(match[1], relation.name, facts)
    return found


def _objects(description: str, relation: str, facts: Facts) -> set[str]:
    return {
        obj
        for subject in _subjects(description, facts)
        for obj in facts.get((subject, relation), ())
    }


def _compared(question: str, facts: Facts) -> Iterator[str]:
    for relation, forms in COMPARISONS.items():
        for form in forms:
            if match := re.fullmatch(
                re.escape(form).replace(r"\{a\}", "(.+)").replace(r"\{b\}", "(.+)"), question
            ):
                first, other = (_objects(match[number], relation, facts) for number in (1, 2))
                if first and other:
                    yield "yes" if first == other else "no"


def _fullmatch(form: str, text: str) -> re.Match[str] | None:
    return re.fullmatch(re.escape(form).replace(r"\{s\}", "(.+)"), text)
