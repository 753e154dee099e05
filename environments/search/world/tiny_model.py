"""What the starting policy's tokenizer is made from: texts of the fictional world, and the tags of
the protocol."""

from __future__ import annotations

import random
from collections.abc import Iterator

from rlflow_environments.search.world.demonstrations import Clumsiness, demonstrate
from rlflow_environments.search.world.names import syllables

VOCABULARY = 1536
TAGS = (
    "<think>",
    "</think>",
    "<search>",
    "</search>",
    "<information>",
    "</information>",
    "<answer>",
    "</answer>",
)

# How the vocabulary is learned: a capitalised word is split after its third letter, so that no
# token crosses the seam between
# the two syllables of an invented name.
LEARNED_ON = (
    r"Question|Title| ?[A-Z][a-z]{0,2}|'s| ?[a-z]+| ?\d{1,2}| ?[^\sA-Za-z\d]+|\s+(?!\S)|\s+"
)


def tokenizer_texts(seed: int = 0) -> Iterator[str]:
    """Demonstrations, and all names of the world."""
    generator, clumsy = random.Random(seed), Clumsiness(guess=0.1, vague=0.1, give_up=0.1)
    for _ in range(1500):
        demonstration = demonstrate(generator, clumsy)
        yield "".join(
            [demonstration.prompt, *(part for turn in demonstration.turns for part in turn)]
        )
    first, last = syllables()
    for _ in range(20):
        yield "".join(f" {a}{b}" for a, b in zip(first, last, strict=True))
        yield "\n".join(f'"{a}{b}' for a, b in zip(first, last, strict=True))
