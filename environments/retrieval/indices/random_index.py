"""Passages that do not depend on what is asked: the baseline of a policy that does not read."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.retrieval.indices.base import Ranking


class RandomIndex:
    """Passages drawn by (seed, query): what a policy that does not read would not miss. Scores are 0."""

    def __init__(self, corpus: Sequence[Passage], *, seed: int = 0) -> None:
        self._size = len(corpus)
        self._seed = seed

    def rank(self, queries: Sequence[str], top_k: int) -> list[Ranking]:
        return [self._draw(query, min(top_k, self._size)) for query in queries]

    def _draw(self, query: str, count: int) -> Ranking:
        digest = hashlib.blake2b(f"{self._seed}:{query}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
        generator = random.Random(int.from_bytes(digest, "little"))
        drawn: dict[int, float] = {}  # one by one: a short result is the beginning of a longer one
        while len(drawn) < count:
            drawn[generator.randrange(self._size)] = 0.0
        return list(drawn.items())
