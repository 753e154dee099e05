"""Sources of the starting policy: the texts of its tokenizer, and the training rows of its
supervised warm-up."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from rlflow_environments.search.world.demonstrations import Part, Slips, demonstrate, repeated_names
from rlflow_environments.search.world.prose import syllables

CLUMSY = Slips(guess=0.3, early=0.2, give_up=0.65)
VOCABULARY = 1536
TAGS = tuple(
    f"<{slash}{tag}>" for tag in ("think", "search", "information", "answer") for slash in ("", "/")
)
LEARNED_ON = (
    r"Question|Title| ?[A-Z][a-z]{0,2}|'s| ?[a-z]+| ?\d{1,2}| ?[^\sA-Za-z\d]+|\s+(?!\S)|\s+"
)
"""What the vocabulary is learned on: a capitalised word is split after its third letter, so that no
token crosses the seam between the two syllables of an invented name."""


def tokenizer_texts() -> Iterator[str]:
    """Demonstrations, and all names of the world."""
    generator, clumsy = random.Random(0), Slips(0.1, 0.1, 0.1)
    for _ in range(1500):
        (parts,) = demonstrate(generator, clumsy).segments()
        yield "".join(text for text, _ in parts)
    first, last = syllables()
    for _ in range(20):
        yield "".join(f" {a}{b}" for a, b in zip(first, last, strict=True))
        yield "\n".join(f'"{a}{b}' for a, b in zip(first, last, strict=True))


@dataclass(frozen=True)
class Curriculum:
    """Which rows to draw at which point of the schedule, as shares of it.

    Copying names that were never seen before is the skill that all else rests on, and the last one
    that a tiny model learns. So it is drilled first, then used on short traces, then on full ones;
    only towards the end the traces turn clumsy, which spoils the behaviour and not the skill.

    drill: until then every second row only repeats names. one_result: until then a search brings
    one passage, afterwards mostly three. clumsy: from there on the traces go wrong as often as
    `clumsiness` says."""

    drill: float = 0.08
    one_result: float = 0.15
    clumsy: float = 0.8
    clumsiness: Slips = CLUMSY

    def row(self, generator: random.Random, done: float) -> list[Part]:
        """The parts of one training row when the share `done` of the schedule is over."""
        if done < self.drill and generator.random() < 0.5:
            once, again = repeated_names(generator)
            return [(once, False), (again, True)]
        top_k = 1 if done < self.one_result else generator.choice([1, 2, 3, 3, 3, 3])
        slips = Slips() if done < self.clumsy else self.clumsiness
        return demonstrate(generator, slips, top_k).segments()[0]
