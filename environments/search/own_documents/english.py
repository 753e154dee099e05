"""Names and facts in English prose, by rule: phrases that state a relation (english.yaml), and the
questions that ask for it.

The rules prefer leaving a fact out to getting it wrong. What no phrase of the table states can
still be asked for as a blank in its sentence (`blanks`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

BLANK = "blank"
_CAPITAL = "A-Z\u00c0-\u00d6\u00d8-\u00de\u0386-\u03ab\u0400-\u042f"
_WORD = rf"[{_CAPITAL}][\w'’-]*"
NAME = (
    rf"{_WORD}(?:\s+(?:(?:of|de|da|di|van|von|du|bin|al)\s+(?:(?:the|der|den|la|le)\s+)?)?{_WORD})*"
)
_NAME = re.compile(r"(?<![\w/.@-])" + NAME)
_YEAR = r"\b1\d{3}\b|\b20\d{2}\b"


@dataclass(frozen=True)
class Fact:
    """What a sentence states. relation: a name in english.yaml, or BLANK. question: with {s} for
    the subject. description: of the object, by which another question can name it. query: what
    finds the sentence."""

    subject: str
    relation: str
    object: str
    question: list[str]
    description: str
    query: str


def _compiled(phrase: str, year: bool) -> re.Pattern[str]:
    # Atomic groups: a name is taken whole or not at all.
    object_ = _YEAR if year else NAME
    slots = {"s": rf"(?:[Tt]he )?(?P<s>(?>{NAME}))", "o": rf"(?P<o>(?>{object_}))"}
    first = re.sub(r"^the ", "[Tt]he ", phrase)
    # A phrase begins its sentence, so that "the tower of X was built by Y" is not about X; an
    # object that goes on with "and" is only a part of the answer.
    return re.compile("^" + first.format(**slots) + r"(?=$|[,.;:]|\s(?!and\b|or\b))")


_TABLES: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
LEADING = set(_TABLES["leading"].split())
_PHRASES: list[tuple[str, Mapping[str, Any], re.Pattern[str]]] = [
    (name, relation, _compiled(phrase, relation.get("year", False)))
    for name, relation in _TABLES["relations"].items()
    for phrase in relation["phrases"]
]
_PRONOUN = re.compile(r"^(?:He|She|It|They)\b")


def names_in(text: str) -> list[str]:
    """The names of a text, in order, each once; a word that merely begins a sentence is no part of
    one."""
    return list(
        dict.fromkeys(name for match in _NAME.finditer(text) if (name := _without_lead(match[0])))
    )


def _without_lead(name: str) -> str:
    words = name.split()
    while words and words[0].lower() in LEADING:
        words.pop(0)
    plain = re.sub(r"['’](?:s)?$", "", " ".join(words))
    return plain if len(plain) > 1 else ""


def resolve_pronoun(sentence: str, title: str) -> str:
    """The sentence with the document's title in place of the pronoun that begins it, where the
    title is a name."""
    return (
        _PRONOUN.sub(title, sentence) if _NAME.fullmatch(title.removeprefix("The ")) else sentence
    )


def facts_of(sentence: str, title: str) -> Iterator[Fact]:
    """The facts that the table finds in a sentence of a document with this title."""
    text = resolve_pronoun(sentence, title)
    for name, relation, phrase in _PHRASES:
        found = phrase.search(text)
        if found is None:
            continue
        subject = _with_article(_without_lead(found["s"]), title)
        object_ = _without_lead(found["o"]) or found["o"]
        # A name that goes on behind what was found has a particle that the rules do not know.
        cut = re.search(re.escape(object_) + r"[-–]\w", text)
        if not subject or subject == object_ or cut:
            continue
        description = relation.get("description", "").format(s=subject)
        query = f"{subject} {relation['keyword']}"
        yield Fact(subject, name, object_, relation["questions"], description, query)


def _with_article(subject: str, title: str) -> str:
    """A work's name keeps the article that its title has: The Silent Harbour."""
    return title if title == f"The {subject}" else subject
