"""Names and facts in English prose, by rule: a table of phrases that state a relation, and the
questions that ask for it.

The rules prefer leaving a fact out to getting it wrong. What no phrase of the table states can
still be asked for as a blank in its sentence; that works for any language with capital letters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

BLANK = "blank"
_CAPITAL = "A-Z\u00c0-\u00d6\u00d8-\u00de\u0386-\u03ab\u0400-\u042f"
_WORD = rf"[{_CAPITAL}][\w'’-]*"
NAME = (
    rf"{_WORD}(?:\s+(?:(?:of|de|da|di|van|von|du|bin|al)\s+(?:(?:the|der|den|la|le)\s+)?)?{_WORD})*"
)
_NAME = re.compile(r"(?<![\w/.@-])" + NAME)
_YEAR = re.compile(r"\b1\d{3}\b|\b20\d{2}\b")
_LEADING = {"the", "a", "an", "in", "on", "at", "by", "from", "of", "to", "for", "with", "as", "it", "he", "she", "they", "his", "her",
            "its", "their", "this", "that", "these", "those", "there", "when", "while", "after", "before", "since", "until", "during",
            "although", "but", "and", "or", "if", "no", "not", "few", "many", "most", "some", "all", "every", "each", "one", "two",
            "first", "here", "who", "what", "which", "where", "how", "why", "i", "we", "you", "my", "our", "your", "both", "because",
            "however", "today", "later", "then", "also", "under", "over", "near", "between", "through", "into", "about",
            "only", "even", "once", "so", "such", "like", "another", "other", "several", "what's", "it's"}  # fmt: skip
"""Words that are capitalised because a sentence begins with them, not because they belong to a
name."""


@dataclass(frozen=True)
class PhrasedRelation:
    """phrases: how prose states it, with {s} and {o}. questions: with {s}. description: a noun
    phrase for the object, by which a question names it without its name; empty where there is none.
    keyword: what a query adds to the subject. object: `name` or `year`."""

    name: str
    phrases: tuple[str, ...]
    questions: tuple[str, ...]
    description: str = ""
    keyword: str = ""
    object: str = "name"


PHRASED_RELATIONS: tuple[PhrasedRelation, ...] = (
    PhrasedRelation("birthplace", ("{s} was born in {o}", "{s} was born on [^.]{{1,30}} in {o}", "the birthplace of {s} (?:is|was) {o}"),
             ("Where was {s} born?", "What is the birthplace of {s}?"), "the birthplace of {s}", "birthplace"),
    PhrasedRelation("deathplace", ("{s} died in {o}", "{s} died on [^.]{{1,30}} in {o}"),
             ("Where did {s} die?",), "the place where {s} died", "died"),
    PhrasedRelation("spouse", ("{s} married {o}", "{s} was married to {o}", "the (?:spouse|wife|husband) of {s} (?:is|was) {o}"),
             ("Who was {s} married to?", "Who was the spouse of {s}?"), "the spouse of {s}", "spouse"),
    PhrasedRelation("teacher", ("{s} studied (?:under|with) {o}", "{s} was (?:taught|trained) by {o}", "{s} was a (?:pupil|student) of {o}",
                         "the teacher of {s} (?:is|was) {o}"),
             ("Who was the teacher of {s}?", "Who taught {s}?"), "the teacher of {s}", "teacher"),
    PhrasedRelation("author", ("{s} was written by {o}", "{o} wrote {s}", "the author of {s} (?:is|was) {o}", "{s} is an? (?:book|novel|poem|play) by {o}"),
             ("Who wrote {s}?", "Who is the author of {s}?"), "the author of {s}", "author"),
    PhrasedRelation("founder", ("{s} was (?:founded|established|started|set up) by {o}", "{o} founded {s}", "the founder of {s} (?:is|was) {o}"),
             ("Who founded {s}?", "Who was the founder of {s}?"), "the founder of {s}", "founder"),
    PhrasedRelation("inventor", ("{s} was (?:invented|discovered|designed|developed) by {o}", "{o} (?:invented|discovered|designed) {s}"),
             ("Who invented, discovered or designed {s}?",), "the inventor, discoverer or designer of {s}", "invented"),
    PhrasedRelation("maker", ("{s} was (?:directed|composed|painted|created) by {o}", "{o} (?:directed|composed|painted|created) {s}"),
             ("Who made {s}?",), "the one who made {s}", "made"),
    PhrasedRelation("seat", ("{s} (?:is|was) (?:based|headquartered) in {o}", "{s} has its (?:seat|headquarters|head office) in {o}",
                      "the (?:seat|headquarters|head office) of {s} (?:is|are|was) in {o}"),
             ("Where is {s} based?", "Where does {s} have its seat?"), "the seat of {s}", "seat"),
    PhrasedRelation("capital", ("the capital of {s} (?:is|was) {o}", "{o} (?:is|was) the capital of {s}"),
             ("What is the capital of {s}?",), "the capital of {s}", "capital"),
    PhrasedRelation("country", ("{s} is an? (?:\\w+ )?(?:town|city|village|port|municipality) in {o}", "{s} belongs to {o}"),
             ("In which country or region is {s}?", "What does {s} belong to?"), "the country or region of {s}", "country"),
    PhrasedRelation("river", ("{s} (?:lies|stands|is) on (?:the (?:banks of )?)?(?:the )?{o}", "the {o} (?:runs|flows) through {s}"),
             ("Which river flows through {s}?", "On which river does {s} lie?"), "the river of {s}", "river"),
    PhrasedRelation("mouth", ("{s} (?:flows|empties) into {o}", "the mouth of (?:the )?{s} is at {o}"),
             ("Into which water does {s} flow?", "Where does {s} end?"), "the water that {s} flows into", "mouth"),
    PhrasedRelation("source", ("{s} rises in (?:the )?{o}", "the source of (?:the )?{s} is in (?:the )?{o}"),
             ("Where does {s} rise?", "What is the source of {s}?"), "the source of {s}", "source"),
    PhrasedRelation("birth year", ("{s} was born in {o}", "{s} was born on [^.]{{1,30}} {o}"), ("In which year was {s} born?",), "", "born", "year"),
    PhrasedRelation("founding year", ("{s} was (?:founded|established|built|opened) in {o}",), ("In which year was {s} founded or built?",), "",
             "founded", "year"),
    PhrasedRelation("publication year", ("{s} was (?:published|released|written) in {o}",), ("In which year was {s} published?",), "", "published", "year"),
)  # fmt: skip


@dataclass(frozen=True)
class Fact:
    """What a sentence states. relation: a name in PHRASED_RELATIONS, or BLANK. question: with {s}
    for the subject. description: of the object, by which another question can name it. query: what
    finds the sentence."""

    subject: str
    relation: str
    object: str
    question: tuple[str, ...]
    description: str
    query: str


def _compiled(phrase: str, relation: PhrasedRelation) -> re.Pattern[str]:
    # Atomic groups: a name is taken whole or not at all.
    object_ = NAME if relation.object == "name" else _YEAR.pattern
    slots = {"s": rf"(?:[Tt]he )?(?P<s>(?>{NAME}))", "o": rf"(?P<o>(?>{object_}))"}
    first = re.sub(r"^the ", "[Tt]he ", phrase)
    # A phrase begins its sentence, so that "the tower of X was built by Y" is not about X; an
    # object that goes on with "and" is
    # only a part of the answer.
    return re.compile("^" + first.format(**slots) + r"(?=$|[,.;:]|\s(?!and\b|or\b))")


_PHRASES = [
    (relation, _compiled(phrase, relation))
    for relation in PHRASED_RELATIONS
    for phrase in relation.phrases
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
    while words and words[0].lower() in _LEADING:
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
    for relation, phrase in _PHRASES:
        found = phrase.search(text)
        if found is None:
            continue
        subject, object_ = (
            _with_article(_without_lead(found["s"]), title),
            _without_lead(found["o"]) or found["o"],
        )
        if not subject or not object_ or subject == object_ or _has_title_cut(object_, text):
            continue
        description = relation.description.format(s=subject) if relation.description else ""
        yield Fact(
            subject,
            relation.name,
            object_,
            relation.questions,
            description,
            f"{subject} {relation.keyword}",
        )


def _with_article(subject: str, title: str) -> str:
    """A work's name keeps the article that its title has: The Silent Harbour."""
    return title if title == f"The {subject}" else subject


def _has_title_cut(name: str, text: str) -> bool:
    """Whether the name goes on behind what was found (a lower-case particle that the rules do not
    know)."""
    return re.search(re.escape(name) + r"[-–]\w", text) is not None


def _merely_begins(name: str, text: str) -> bool:
    """Whether a word may have its capital only because the sentence begins with it."""
    return " " not in name and text.startswith(name)


def blank_of(sentence: str, title: str, known: frozenset[str] | set[str]) -> Fact | None:
    """The sentence with a blank in place of one of its names: a title of another document if there
    is one, else the last name.

    None where the sentence names nothing else that a search could start from.
    """
    text = resolve_pronoun(sentence, title)
    if not 20 <= len(text) <= 300 or text[-1] not in ".!?。":
        return None
    begins = {name for name in names_in(text)[:1] if _merely_begins(name, text)} - {title} - known
    names = [name for name in names_in(text) if text.count(name) == 1 and name not in begins]
    others = [name for name in names if name != title and name not in title]
    if len(names) < 2 or not others:
        return None
    answer = next((name for name in others if name in known), others[-1])
    blanked = text.replace(answer, "____")
    subject = title if title in blanked else next(name for name in names if name != answer)
    if subject not in blanked:
        return None
    template = blanked.replace("{", "(").replace("}", ")").replace(subject, "{s}", 1)
    query = blanked.replace("____", " ").strip()
    return Fact(subject, BLANK, answer, (f'What fills the blank in "{template}"?',), "", query)
