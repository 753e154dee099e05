"""Retrievers, and the one that shows passages of a corpus in the order of an index."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from rlflow.errors import ConfigError
from rlflow_environments.retrieval.corpus import Passage

Ranking = list[tuple[int, float]]
"""(row of the corpus, score) pairs, best first, every row at most once."""
SHORT = 16 << 20  # numbers that a query is multiplied with: what one core reads in some 5 ms


T = TypeVar("T", bound=Callable[..., Any])


@dataclass(frozen=True)
class RetrieverFacts:
    """What is known of a retriever before it is made.

    package: an optional one that it imports; extra: that of rlflow which installs it. shared:
    whether each process of a server may make it. elsewhere: whether a server that runs already
    searches. parts: of a retriever that is made from others, {option: name where it gives none}."""

    package: str = ""
    extra: str = "search"
    shared: bool = True
    elsewhere: bool = False
    parts: Mapping[str, str] = field(default_factory=dict)


def with_facts(facts: RetrieverFacts) -> Callable[[T], T]:
    """Marks a function that makes a retriever with what is known of it."""

    def mark(make: T) -> T:
        make.facts = facts  # type: ignore[attr-defined]
        return make

    return mark


class Retriever(ABC):
    """Finds passages by text. Thread-safe."""

    facts: ClassVar[RetrieverFacts] = RetrieverFacts()
    """Of the class; a function that makes retrievers has its own (`with_facts`)."""

    @abstractmethod
    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """For each query, in order, at most `top_k` passages with their scores, best first. Any
        string is a legal query."""


class Index(Protocol):
    """Ranks the rows of the corpus that it was built on. Thread-safe."""

    def rank(self, queries: Sequence[str], top_k: int) -> list[Ranking]: ...


@dataclass(eq=False, repr=False)
class CorpusRetriever(Retriever):
    """Passages of a corpus in the order of an index."""

    corpus: Sequence[Passage]
    index: Index

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """See Retriever. Raises ConfigError for top_k below 1."""
        check_top_k(top_k)
        if not queries:
            return []
        return [
            [replace(self.corpus[row], score=score) for row, score in ranking]
            for ranking in self.rank(queries, top_k)
        ]

    def rank(self, queries: Sequence[str], top_k: int) -> list[Ranking]:
        """As the index does it, without the corpus's rows that have no text."""
        empty = getattr(self.corpus, "empty", frozenset())
        wanted = top_k
        while True:
            found = self.index.rank(queries, wanted)
            kept = [[hit for hit in ranking if hit[0] not in empty] for ranking in found]
            enough = all(
                len(few) >= top_k or len(all_) < wanted
                for few, all_ in zip(kept, found, strict=True)
            )
            if not empty or enough or wanted >= len(self.corpus):
                return [ranking[:top_k] for ranking in kept]
            wanted *= 4


def check_top_k(top_k: int) -> None:
    """Raises ConfigError for top_k below 1."""
    if top_k < 1:
        raise ConfigError(f"top_k: expected at least 1, found {top_k}.")


def best(rows: np.ndarray, scores: np.ndarray, top_k: int) -> Ranking:
    """The `top_k` best of `rows` (ascending), best first, ties by row. scores: one per element of
    `rows`."""
    kept = np.arange(len(rows))
    if len(rows) > top_k:
        cut = np.partition(scores, len(rows) - top_k)[len(rows) - top_k]
        above, tied = kept[scores > cut], kept[scores == cut]
        kept = np.concatenate([above, tied[: top_k - len(above)]])
    order = kept[np.lexsort((rows[kept], -scores[kept]))]
    return [(int(row), float(score)) for row, score in zip(rows[order], scores[order], strict=True)]
