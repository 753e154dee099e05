"""Blanks in sentences, for what no relation of the table states: which sentence can carry one, and
which of its names is an answer.

Documents are full of what looks like a sentence and is none: options, code, headings that run into
the next line, entries of lists. A blank in these asks for nothing, so whatever is doubtful is
refused, by a reason that the report counts."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from rlflow_environments.search.own_documents.english import (
    BLANK,
    LEADING,
    Fact,
    names_in,
    resolve_pronoun,
)

FAULTS = {
    "fragment": "no whole sentence",
    "code": "code, options or names of files",
    "unbalanced": "an open quote or bracket",
    "legal": "legal text",
    "no name": "no two names, of which one could be the answer",
}
"""Reason -> what the report says of sentences that it refuses a blank."""
SHORTEST, LONGEST = 20, 300  # characters
LEAST_WORDS = 6
_CODE = re.compile(
    r"[\\|<>$#*=_{}\[\]`~^@+•·]|--|::|\(\)|\.\.\.|…"
    r"|(?<!\w)-\w"  # -a
    r"|(?<!\w)[./]\w|\w/\w"  # .git, /etc, a/b
    r"|\w\(\d\w?\)"  # ls(1)
    r"|\b(?!e\.g|i\.e|a\.m|p\.m)[a-z]\w*\.[a-z]\w*\b"  # os.path, file.txt
)
_LEGAL = re.compile(r"(?i)\bcopyright|\(c\) \d|©|\blicen[cs]e|\bwarrant(?:y|ies)\b|\bliab")
_BEGINS = re.compile(r"[\"“‘]?[^\W\d_]\w")
_CUT_OFF = re.compile(r"\b(?:eds?|pp|al)\.$")
# A heading, or the name of an entry, that runs into the sentence behind it
_JOINED = re.compile(r"\w (?:An|If|When|This|These|It|Use|Set|Print)\s")
_SHOUTED = re.compile(r"[A-Z][A-Z0-9-]+(?: [A-Z][A-Z0-9-]+)* ([A-Z][a-z]+)\b")
_VERB = re.compile(
    r"\b(?:is|are|was|were|be|been|has|have|had|can|could|may|might|must|shall|should|will|would"
    r"|do|does|did|became|began|built|came|gave|got|grew|held|kept|knew|led|left|lost|made|met|ran"
    r"|rose|sold|said|saw|sent|sat|spoke|stood|took|told|went|won|wrote|[a-z]{3,}ed)\b"
    r"|\b(?:he|she|it|who|which|that|[A-Z]\w*) [a-z]{2,}s\b"
)
# I'm, Paris-based
_NO_NAME = re.compile(r"['’](?:m|re|ve|ll|d|t)\b|-[a-z]+$")
_PAIRS = ("()", "“”", "«»")
_SUFFIXES = {"inc", "ltd", "co", "corp", "llc", "gmbh", "jr", "sr", "mr", "mrs", "dr", "st", "no"}


def ordinary_words(texts: Iterable[str]) -> set[str]:
    """The words that stand in the texts without a capital: a name that is one of them is none."""
    return {word for text in texts for word in re.findall(r"\w+", text) if word.islower()}


def blank_of(
    sentence: str, title: str, known: Collection[str], ordinary: Collection[str] = ()
) -> Fact | str:
    """The sentence with a blank in place of one of its names, or the reason (FAULTS) why it has
    none. The name is a title of another document (`known`) if there is one, else the last name.
    ordinary: words that begin no name."""
    text = resolve_pronoun(sentence, title)
    if fault := sentence_fault(text, ordinary):
        return fault
    names = [name for name in names_in(text) if text.count(name) == 1]
    # A word may have its capital only because the sentence begins with it
    begins = {name for name in names[:1] if " " not in name and text.startswith(name)}
    begins -= {title} | set(known)
    names = [name for name in names if name not in begins]
    others = [name for name in names if name != title and name not in title]
    answers = [name for name in others if name in known or is_answer(name, text, ordinary)]
    if len(names) < 2 or not answers:
        return "no name"
    answer = next((name for name in answers if name in known), answers[-1])
    blanked = text.replace(answer, "____")
    subject = title if title in blanked else next(name for name in names if name != answer)
    if subject not in blanked:
        return "no name"
    template = blanked.replace(subject, "{s}", 1)
    query = blanked.replace("____", " ").strip()
    return Fact(subject, BLANK, answer, [f'What fills the blank in "{template}"?'], "", query)


def sentence_fault(text: str, ordinary: Collection[str] = ()) -> str:
    """The reason why a text is no sentence to put a blank into, or ""."""
    if not SHORTEST <= len(text) <= LONGEST or text[-1] not in ".!?。":
        return "fragment"
    if _CODE.search(text):
        return "code"
    if _LEGAL.search(text):
        return "legal"
    if text.count('"') % 2 or any(text.count(one) != text.count(two) for one, two in _PAIRS):
        return "unbalanced"
    return "" if _is_whole(text, ordinary) else "fragment"


def _is_whole(text: str, ordinary: Collection[str]) -> bool:
    """Whether it begins as a sentence does, and says something: in scripts without capitals, all
    that ends as one."""
    if text[-1] == "。":
        return True
    begins = _BEGINS.match(text)
    if begins is None or begins[0].lstrip('"“‘')[0].islower():
        return False
    if _JOINED.search(text) or _CUT_OFF.search(text):
        return False
    shouted = _SHOUTED.match(text)
    if shouted and shouted[1].lower() in {*LEADING, *ordinary}:
        return False
    words = text.split()
    plain = sum(word.strip(",.;:!?()\"“”'’").islower() for word in words)
    return len(words) >= LEAST_WORDS and 3 * plain >= len(words) and bool(_VERB.search(text))


def is_answer(name: str, text: str, ordinary: Collection[str]) -> bool:
    """Whether a name of a text is one that can be asked for: no word that has its capital by its
    place, no part of a longer word, no mere suffix."""
    words = name.lower().split()
    if words[-1] in _SUFFIXES or all(word in ordinary for word in words):
        return False
    if len(set(words)) < len(words) or _NO_NAME.search(name):
        return False
    place = text.index(name)
    before, behind = text[:place], text[place + len(name) :]
    if re.search(r"[\w\-/&.%‐–]$", before) or re.match(r"[-/&‐–+]?\w|[/&+]", behind):
        return False
    # Where another sentence, a quotation or an entry begins, any word has a capital
    return not re.search(r"(?:^|[.:;!?]|[.:;!?] ?[\"“‘(]|^[\"“‘(])\s*$", before) or len(words) > 1
