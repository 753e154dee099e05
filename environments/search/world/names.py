"""Invented names: words of two syllables from a fixed inventory, in two pools that share every syllable and no word.

The "val" pool is kept for validation questions of every world; "train" serves the warm-up and the training questions. A
policy that has seen all syllables and none of the words can answer validation questions only by reading.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence

POOLS = ("train", "val")

_UNFIT = {"bum", "cum", "dam", "dum", "fan", "fat", "fag", "gas", "gun", "god", "hel", "hor", "kil", "kum", "nad", "nig", "pis",
          "pus", "rap", "sad", "sal", "sex", "sin", "tit", "tum", "vom"}  # fmt: skip

_RUNS_TOGETHER = {"sk", "nd", "st", "nt", "rs", "ng", "rt", "ns", "ll", "nk"}
"""Letters that also stand inside syllables and ordinary words: a tokenizer would split a name with such a seam elsewhere."""


@functools.cache
def syllables() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The inventory: 200 first syllables of exactly three letters, capitalised, and 200 endings of three or four."""
    generator = random.Random(20_240_501)
    first = ["".join(s) for s in itertools.product("bdfghklmnprstvz", "aeiou", "lnrsmvd")]
    first = sorted(s for s in first if s not in _UNFIT)
    last = [
        "".join(s)
        for s in itertools.product("bdfgklmnprstv", "aeiou", ["ra", "na", "la", "th", "ne", "sk", "ro", "n", "s", "nd"])
    ]
    last = sorted(s for s in last if s not in _UNFIT)
    generator.shuffle(first)
    generator.shuffle(last)
    return tuple(s.capitalize() for s in first[:200]), tuple(last[:200])


def fits(first: str, last: str) -> bool:
    """Whether the two syllables may stand together in a name."""
    return first[-1] + last[0] not in _RUNS_TOGETHER


def pool_of(first: int, last: int) -> str:
    """Which pool the word of syllables (first, last) belongs to: a fifth of the words of every syllable is "val"."""
    return "val" if (first + 3 * last) % 5 == 0 else "train"


class NameSource:
    """Draws words of one pool, none of them twice."""

    def __init__(self, generator: random.Random, pool: str):
        if pool not in POOLS:
            raise ValueError(f"pool must be one of {POOLS}, found {pool!r}")
        self._generator = generator
        self._pool = pool
        self._used: set[str] = set()

    def word(self) -> str:
        """An unused word of the pool, e.g. "Kasporo"."""
        first, last = syllables()
        while True:
            i, j = self._generator.randrange(len(first)), self._generator.randrange(len(last))
            word = first[i] + last[j]
            if fits(first[i], last[j]) and pool_of(i, j) == self._pool and word not in self._used:
                self._used.add(word)
                return word

    def person(self) -> str:
        return f"{self.word()} {self.word()}"

    def choice(self, options: Sequence[str]) -> str:
        return options[self._generator.randrange(len(options))]
