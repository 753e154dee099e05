"""An imperfect retriever, for policies that must not count on a perfect one: late, lost, noisy and
outdated results.

What happens to a search depends on the seed, the task, the query and how often the episode asked
it, and on nothing else: attempts of a group that ask the same get the same, and a run repeats
itself.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rlflow.components import check_options
from rlflow.values import NonNegativeFloat, Share
from rlflow_environments.common.text import well_formed
from rlflow_environments.retrieval.corpus import Passage

Find = Callable[[str, int], Awaitable[list[Passage]]]
"""(query, top_k) -> passages, of the retriever that is disturbed."""


class Disturbances:
    """What goes wrong, and how often. Each of the four is off at 0."""

    def __init__(
        self,
        *,
        latency_s: NonNegativeFloat = 0.0,
        drop: Share = 0.0,
        noise: Share = 0.0,
        stale: Share = 0.0,
        splits: str | Sequence[str] = ("train",),
        seed: int = 0,
    ) -> None:
        """latency_s: mean of an exponentially distributed delay. drop: share of searches that come
        back empty. noise: share of passages replaced by some that answer another question. stale:
        share of the corpus that the index does not have yet, always the same passages. splits:
        where searches are disturbed; evaluation is not, unless it says so.
        """
        self.splits = (splits,) if isinstance(splits, str) else tuple(splits)
        self._latency_s, self._drop, self._noise, self._stale = latency_s, drop, noise, stale
        self._seed = seed

    async def search(
        self,
        find: Find,
        query: str,
        top_k: int,
        *,
        task_id: str,
        asked_before: int,
        others: Sequence[str],
    ) -> tuple[list[Passage], bool]:
        """(the passages that come back, whether that differs from what a perfect retriever gives).
        asked_before: how often the episode asked this; others: questions that noise is searched
        with."""
        generator = random.Random(well_formed(f"{self._seed}/{task_id}/{asked_before}/{query}"))
        delay = generator.expovariate(1 / self._latency_s) if self._latency_s else 0.0
        dropped = generator.random() < self._drop
        if delay:
            await asyncio.sleep(delay)
        if dropped:
            return [], True
        passages = await find(query, top_k)
        shown = await self._outdated(find, query, top_k, passages) if self._stale else passages
        shown = await self._with_noise(find, shown, generator, others) if self._noise else shown
        return shown, shown != passages

    async def _outdated(
        self, find: Find, query: str, top_k: int, passages: list[Passage]
    ) -> list[Passage]:
        """What an index without the missing passages would have found instead, as far as twice as
        many reach."""
        if not any(map(self._missing, passages)):
            return passages
        further = await find(query, 2 * top_k)
        return [passage for passage in further if not self._missing(passage)][:top_k]

    def _missing(self, passage: Passage) -> bool:
        return (
            random.Random(well_formed(f"{self._seed}/stale/{passage.id}/{passage.url}")).random()
            < self._stale
        )

    async def _with_noise(
        self, find: Find, passages: list[Passage], generator: random.Random, others: Sequence[str]
    ) -> list[Passage]:
        """Some passages exchanged for the best ones of another question, in their places."""
        places = [place for place in range(len(passages)) if generator.random() < self._noise]
        if not places or not others:
            return passages
        found = await find(generator.choice(others), len(passages))
        shown = list(passages)
        kept = {passage.id for passage in passages}
        for place, passage in zip(places, (passage for passage in found if passage.id not in kept)):
            shown[place] = passage
        return shown


def make_disturbances(options: Mapping[str, Any] | None) -> Disturbances | None:
    """The disturbances of a configuration; None for none. Raises ConfigError for an unknown option
    or a wrong value."""
    if not options:
        return None
    return Disturbances(**check_options(options, Disturbances, where="environment.disturbances"))
