"""Retrievers by name and options: what stands under `retriever:` in a configuration."""

from __future__ import annotations

import hashlib
import inspect
import random
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.components import Kind
from rlflow.errors import ConfigError, DataError
from rlflow.values import PositiveInt, hints_of
from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.retrieval.indices.base import (
    CorpusRetriever,
    Index,
    Ranking,
    Retriever,
    RetrieverFacts,
    with_facts,
)

RETRIEVER = Kind("retriever", "rlflow_environments.retrieval.retrievers", reserved=("corpus",))
"""A class or function of `corpus`, the passages, and options. Where it may be None, the retriever
brings its documents."""
_DAMPING = 60  # Cormack, Clarke and Buettcher 2009


def make_retriever(
    component: str | Mapping[str, Any], corpus: Sequence[Passage] | None, where: str = "retriever"
) -> Retriever:
    """A retriever over a corpus, by name and options: {"name": "dense", "dimensions": 512}, or just
    the name.

    Names: bm25, dense (or faiss), hybrid (options `bm25` and `dense`: those of its parts), qdrant,
    http (a server), random, those of installed packages, `package.module:Name` and `file.py:Name`.
    An index of `rlflow search build` is given by `path`. where: the place in the configuration.

    Raises ConfigError for an unknown name or option, or a corpus that is missing, DataError for an
    empty corpus, MissingPackageError.
    """
    target, options = RETRIEVER.complete(component, where, corpus=corpus)
    if corpus is None and _needs_corpus(target):
        raise without_corpus(RETRIEVER.component(component)["name"], where)
    if corpus is not None and not len(corpus):
        raise DataError("retriever: the corpus holds no passages; expected at least one.")
    return target(**options)


def without_corpus(name: str, where: str) -> ConfigError:
    """The error for a retriever that needs a corpus where there is none."""
    return ConfigError(
        f"{where} '{name}': it needs a corpus. Set environment.corpus to a .jsonl file of passages."
    )


def brings_documents(component: str | Mapping[str, Any], where: str = "retriever") -> bool:
    """Whether the retriever can do without a corpus. Raises ConfigError for an unknown name."""
    name = RETRIEVER.component(component, where)["name"]
    return not _needs_corpus(RETRIEVER.resolve(name, where))


def retriever_facts(component: str | Mapping[str, Any], where: str = "retriever") -> RetrieverFacts:
    """What the retriever says about itself. Raises ConfigError for an unknown name."""
    name = RETRIEVER.component(component, where)["name"]
    facts: RetrieverFacts = getattr(RETRIEVER.resolve(name, where), "facts", RetrieverFacts())
    return facts


def _needs_corpus(target: Callable[..., Any]) -> bool:
    corpus = inspect.signature(target).parameters.get("corpus")
    return corpus is not None and type(None) not in typing.get_args(hints_of(target).get("corpus"))


@dataclass(frozen=True)
class HybridIndex:
    """Reciprocal rank fusion: sum over the indices of 1 / (60 + rank), rank from 1.

    parts: (name and options, index) by what the part is called. depth: candidates of each index, so
    that a short result is the beginning of a longer one."""

    parts: Mapping[str, tuple[Mapping[str, Any], Index]]
    depth: int = 50

    def rank(self, queries: Sequence[str], top_k: int) -> list[Ranking]:
        candidates = max(self.depth, top_k)
        rankings = [index.rank(queries, candidates) for _, index in self.parts.values()]
        return [_fused(per_query)[:top_k] for per_query in zip(*rankings, strict=True)]


def _fused(rankings: Sequence[Ranking]) -> Ranking:
    fused: dict[int, float] = {}
    for ranking in rankings:
        for place, (row, _) in enumerate(ranking, start=1):
            fused[row] = fused.get(row, 0.0) + 1 / (_DAMPING + place)
    return sorted(fused.items(), key=lambda item: (-item[1], item[0]))


@with_facts(RetrieverFacts(parts={"bm25": "bm25", "dense": "dense"}))
def hybrid_retriever(
    corpus: Sequence[Passage],
    *,
    depth: PositiveInt = 50,
    bm25: Mapping[str, Any] | None = None,
    dense: str | Mapping[str, Any] | None = None,
) -> CorpusRetriever:
    """BM25 and vectors, fused. depth: candidates of each. bm25, dense: options of the parts; dense
    may name another retriever over the corpus."""
    options = {"name": dense} if isinstance(dense, str) else dense or {}
    parts = {"bm25": {"name": "bm25", **(bm25 or {})}, "dense": {"name": "dense", **options}}
    indices = {key: (part, _part(key, part, corpus)) for key, part in parts.items()}
    return CorpusRetriever(corpus, HybridIndex(indices, depth))


def _part(key: str, component: Mapping[str, Any], corpus: Sequence[Passage]) -> Index:
    try:
        made = make_retriever(component, corpus)
    except ConfigError as problem:
        raise ConfigError(f"retriever hybrid.{key}: {problem}") from None
    if not isinstance(made, CorpusRetriever):
        raise ConfigError(
            f"retriever hybrid.{key}: '{component['name']}' does not rank the corpus; expected "
            "faiss."
        )
    return made.index


@dataclass(frozen=True)
class RandomIndex:
    """Rows of a corpus of so many, drawn by (seed, query): what a policy that does not read would
    not miss. Scores are 0."""

    size: int
    seed: int

    def rank(self, queries: Sequence[str], top_k: int) -> list[Ranking]:
        return [self._draw(query, min(top_k, self.size)) for query in queries]

    def _draw(self, query: str, count: int) -> Ranking:
        seed = f"{self.seed}:{query}".encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(seed, digest_size=8).digest()
        generator = random.Random(int.from_bytes(digest, "little"))
        drawn: dict[int, float] = {}  # one by one: a short result is the beginning of a longer one
        while len(drawn) < count:
            drawn[generator.randrange(self.size)] = 0.0
        return list(drawn.items())


def random_retriever(corpus: Sequence[Passage], *, seed: int = 0) -> CorpusRetriever:
    """Passages drawn by (seed, query)."""
    return CorpusRetriever(corpus, RandomIndex(len(corpus), seed))
