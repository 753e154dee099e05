"""The words of the fictional encyclopedia: every fact in several phrasings and the questions that
ask for it, from prose.yaml, and invented names.

Names are words of two syllables from a fixed inventory, in two pools that share every syllable and
no word. The "val" pool is kept for validation questions of every world; "train" serves the warm-up
and the training questions. A policy that has seen all syllables and none of the words can answer
validation questions only by reading.
"""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_RUNS_TOGETHER = {"sk", "nd", "st", "nt", "rs", "ng", "rt", "ns", "ll", "nk"}
"""Letters that also stand inside syllables and ordinary words: a tokenizer would split a name with
such a seam elsewhere."""


@dataclass(frozen=True)
class Relation:
    """One kind of fact, between two kinds of entities. The texts: see prose.yaml."""

    name: str
    subject: str
    object: str
    keyword: str
    sentences: list[str]
    questions: list[str]
    descriptions: list[str]


_TABLES: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
RELATIONS = {
    name: Relation(name, **{"descriptions": [], **fields})
    for name, fields in _TABLES["relations"].items()
}
OPENINGS: dict[str, list[str]] = _TABLES["openings"]
PRONOUNS: dict[str, list[str]] = _TABLES["pronouns"]
COMPARISONS: dict[str, list[str]] = _TABLES["comparisons"]
ADJECTIVES, NOUNS, FIRMS = (_TABLES[name] for name in ("adjectives", "nouns", "firms"))
UNFIT = set(_TABLES["unfit_syllables"])
FILLERS: dict[str, list[str]] = {
    name: _TABLES[f"{name}s"] if name != "goods" else _TABLES[name]
    for name in ("trade", "thing", "genre", "goods")
}
"""What stands in the openings, by its place there."""


@functools.cache
def syllables() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The inventory: 200 first syllables of exactly three letters, capitalised, and 200 endings of
    three or four."""
    generator = random.Random(20_240_501)
    first = ["".join(s) for s in itertools.product("bdfghklmnprstvz", "aeiou", "lnrsmvd")]
    first = sorted(s for s in first if s not in UNFIT)
    endings = ["ra", "na", "la", "th", "ne", "sk", "ro", "n", "s", "nd"]
    last = ["".join(s) for s in itertools.product("bdfgklmnprstv", "aeiou", endings)]
    last = sorted(s for s in last if s not in UNFIT)
    generator.shuffle(first)
    generator.shuffle(last)
    return tuple(s.capitalize() for s in first[:200]), tuple(last[:200])


def fits(first: str, last: str) -> bool:
    """Whether the two syllables may stand together in a name."""
    return first[-1] + last[0] not in _RUNS_TOGETHER


def pool_of(first: int, last: int) -> str:
    """The pool of the word of syllables (first, last): a fifth of the words of every syllable is
    "val"."""
    return "val" if (first + 3 * last) % 5 == 0 else "train"


class NameSource:
    """Draws words of one pool ("train" or "val"), none of them twice."""

    def __init__(self, generator: random.Random, pool: str):
        self._generator = generator
        self.pool = pool
        self._used: set[str] = set()

    def word(self) -> str:
        """An unused word of the pool, e.g. "Kasporo"."""
        first, last = syllables()
        while True:
            i, j = self._generator.randrange(len(first)), self._generator.randrange(len(last))
            word = first[i] + last[j]
            if fits(first[i], last[j]) and pool_of(i, j) == self.pool and word not in self._used:
                self._used.add(word)
                return word

    def person(self) -> str:
        return f"{self.word()} {self.word()}"
