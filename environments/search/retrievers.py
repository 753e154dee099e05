"""Retrievers behind one interface: BM25, dense vectors, their fusion, and random passages; made by name.

A result depends on the query and the corpus alone: not on the batch that it was searched in, and ties go to the earlier row.
"""

from __future__ import annotations

import hashlib
import inspect
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from rlflow.errors import ConfigError, DataError, MissingPackageError, did_you_mean
from rlflow_environments.search.encoder import Encoder, NgramEncoder, split_words
from rlflow_environments.search.formats import Passage

Ranking = list[tuple[int, float]]
"""(row of the corpus, score) pairs, best first, every row at most once."""


class Retriever(ABC):
    """Finds passages by text. Thread-safe."""

    @abstractmethod
    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """For each query, in order, at most `top_k` passages with their scores, best first. Any string is a legal query."""


class Index(Protocol):
    """Ranks the rows of the corpus that it was built on. Thread-safe."""

    def rank(self, queries: Sequence[str], top_k: int) -> list[Ranking]: ...


class CorpusRetriever(Retriever):
    """Passages of a corpus in the order of an index."""

    def __init__(self, corpus: Sequence[Passage], index: Index) -> None:
        self.corpus = corpus
        self.index = index

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """See Retriever. Raises ConfigError for top_k below 1."""
        if top_k < 1:
            raise ConfigError(f"top_k: expected at least 1, found {top_k}.")
        if not queries:
            return []
        rankings = self.index.rank(queries, top_k)
        return [[replace(self.corpus[row], score=score) for row, score in ranking] for ranking in rankings]


class BM25Index:
    """Okapi BM25 as Lucene scores it (bm25s). Only passages that share a word with the query are ranked.

    The words of a title count `title_weight` times more, before saturation (the simple form of BM25F: Robertson, Zaragoza and
    Taylor 2004), so that an article about a name comes before articles that mention it.
    """

    def __init__(self, corpus: Sequence[Passage], *, k1: float = 1.5, b: float = 0.75, title_weight: int = 8) -> None:
        """Builds the index in memory. Raises MissingPackageError without bm25s, ConfigError for values out of range."""
        if k1 < 0 or not 0 <= b <= 1 or title_weight < 0:
            raise ConfigError(
                f"retriever bm25: expected k1 >= 0, b from 0 to 1, title_weight >= 0, found {k1}, {b}, {title_weight}."
            )
        try:
            import bm25s
        except ImportError:
            raise _missing("bm25s", "bm25") from None
        self._vocabulary: dict[str, int] = {}
        rows = [self._learn(split_words(p.contents) + split_words(p.title) * title_weight) for p in corpus]
        self._index = None
        if self._vocabulary:  # a corpus without a single word matches nothing
            self._index = bm25s.BM25(k1=k1, b=b, method="lucene")
            self._index.index((rows, self._vocabulary), create_empty_token=False, show_progress=False)

    def rank(self, queries: Sequence[str], top_k: int) -> list[Ranking]:
        return [self._rank(query, top_k) for query in queries]

    def _learn(self, words: list[str]) -> list[int]:
        return [self._vocabulary.setdefault(word, len(self._vocabulary)) for word in words]

    def _rank(self, query: str, top_k: int) -> Ranking:
        words = [self._vocabulary[word] for word in split_words(query) if word in self._vocabulary]
        if not words or self._index is None:
            return []
        scores = self._index.get_scores_from_ids(words)
        return _best(np.flatnonzero(scores > 0), scores, top_k)


class DenseIndex:
    """Largest inner products of unit vectors (cosine), exactly, over faiss IndexFlatIP.

    faiss sums in another order for large batches than for small ones. So it only proposes candidates; they are scored again
    in one fixed order, and more are asked for until none that was left out could belong to the result.
    """

    _ROUNDING = 1e-5  # far above the error of a float32 inner product of unit vectors
    _BLOCK = 8192  # passages encoded at a time

    def __init__(self, corpus: Sequence[Passage], *, encoder: Encoder | None = None, **options: Any) -> None:
        """Encodes the corpus (options: of NgramEncoder, unless `encoder` is given). Raises MissingPackageError without faiss."""
        try:
            import faiss
        except ImportError:
            raise _missing("faiss", "dense") from None
        self._encoder = encoder if encoder is not None else NgramEncoder(corpus, **options)
        self._index = faiss.IndexFlatIP(self._encoder.dimensions)
        for start in range(0, len(corpus), self._BLOCK):  # never two copies of all vectors
            self._index.add(self._encoder.encode_passages(corpus[start : start + self._BLOCK]))

    def rank(self, queries: Sequence[str], top_k: int) -> list[Ranking]:
        vectors = self._encoder.encode_queries(queries)
        depth = min(top_k + 8, self._index.ntotal)
        scores, rows = self._index.search(vectors, depth)
        # A query without a word is a zero vector: nothing is close to it.
        return [
            self._settle(vector, proposed, candidates, top_k) if vector.any() else []
            for vector, proposed, candidates in zip(vectors, scores, rows, strict=True)
        ]

    def _settle(self, vector: np.ndarray, proposed: np.ndarray, rows: np.ndarray, top_k: int) -> Ranking:
        """The ranking of one query from its candidates, best first, widened while the cut is within rounding."""
        while True:
            rows = np.sort(rows[rows >= 0])
            exact = (self._index.reconstruct_batch(rows).astype(np.float64) * vector).sum(axis=1)
            ranking = [(int(rows[place]), score) for place, score in _best(np.arange(len(rows)), exact, top_k)]
            complete = len(rows) == self._index.ntotal
            if complete or not ranking or proposed[-1] + self._ROUNDING < ranking[-1][1]:
                return ranking
            found, wider = self._index.search(vector[None], min(4 * len(rows), self._index.ntotal))
            proposed, rows = found[0], wider[0]


class HybridIndex:
    """Reciprocal rank fusion: sum over the indices of 1 / (60 + rank), rank from 1 (Cormack, Clarke and Buettcher 2009)."""

    _DAMPING = 60

    def __init__(self, indices: Sequence[Index], *, depth: int = 50) -> None:
        """depth: candidates taken from each index, so that a short result is the beginning of a longer one."""
        self._indices = list(indices)
        self._depth = depth

    def rank(self, queries: Sequence[str], top_k: int) -> list[Ranking]:
        rankings = [index.rank(queries, max(self._depth, top_k)) for index in self._indices]
        return [self._fuse(per_query)[:top_k] for per_query in zip(*rankings, strict=True)]

    def _fuse(self, rankings: Sequence[Ranking]) -> Ranking:
        fused: dict[int, float] = {}
        for ranking in rankings:
            for place, (row, _) in enumerate(ranking, start=1):
                fused[row] = fused.get(row, 0.0) + 1 / (self._DAMPING + place)
        return sorted(fused.items(), key=lambda item: (-item[1], item[0]))


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


def make_retriever(component: str | Mapping[str, Any], corpus: Sequence[Passage]) -> Retriever:
    """A retriever over a corpus, by name and options: {"name": "dense", "dimensions": 512}, or just the name.

    Names: bm25, dense, hybrid (options `bm25` and `dense`: those of its parts), random.
    Raises ConfigError for an unknown name or option, DataError for an empty corpus, MissingPackageError.
    """
    options = {"name": component} if isinstance(component, str) else dict(component)
    name = options.pop("name", None)
    if name not in _RETRIEVERS:
        known = ", ".join(_RETRIEVERS)
        raise ConfigError(
            f"retriever.name: expected one of {known}, found {name!r}.{did_you_mean(str(name), _RETRIEVERS)}"
        )
    if not len(corpus):
        raise DataError("retriever: the corpus holds no passages; expected at least one.")
    build, schemas = _RETRIEVERS[name]
    _check_options(f"retriever {name}", options, schemas)
    return CorpusRetriever(corpus, build(corpus, **options))


def _hybrid(
    corpus: Sequence[Passage],
    *,
    depth: int = 50,
    bm25: Mapping[str, Any] | None = None,
    dense: Mapping[str, Any] | None = None,
) -> HybridIndex:
    _check_options("retriever hybrid.bm25", bm25 or {}, (BM25Index,))
    _check_options("retriever hybrid.dense", dense or {}, (DenseIndex, NgramEncoder))
    return HybridIndex([BM25Index(corpus, **(bm25 or {})), DenseIndex(corpus, **(dense or {}))], depth=depth)


_RETRIEVERS: dict[str, tuple[Callable[..., Index], tuple[Callable[..., Any], ...]]] = {
    # name -> what builds the index, and the signatures that its options come from
    "bm25": (BM25Index, (BM25Index,)),
    "dense": (DenseIndex, (DenseIndex, NgramEncoder)),
    "hybrid": (_hybrid, (_hybrid,)),
    "random": (RandomIndex, (RandomIndex,)),
}


def _check_options(where: str, options: Mapping[str, Any], schemas: Sequence[Callable[..., Any]]) -> None:
    """Raises ConfigError for an option that no signature has."""
    parameters = [parameter for schema in schemas for parameter in inspect.signature(schema).parameters.values()]
    known = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            raise ConfigError(
                f"{where}: unknown option '{option}'; known: {', '.join(known)}.{did_you_mean(option, known)}"
            )


def _best(rows: np.ndarray, scores: np.ndarray, top_k: int) -> Ranking:
    """The `top_k` best of `rows` (ascending), best first, ties by row. scores: of every row."""
    if len(rows) > top_k:
        cut = np.partition(scores[rows], len(rows) - top_k)[len(rows) - top_k]
        above, tied = rows[scores[rows] > cut], rows[scores[rows] == cut]
        rows = np.concatenate([above, tied[: top_k - len(above)]])
    order = np.lexsort((rows, -scores[rows]))
    return [(int(rows[place]), float(scores[rows[place]])) for place in order]


def _missing(package: str, retriever: str) -> MissingPackageError:
    return MissingPackageError(
        f"retriever {retriever}: the package {package} is not installed. Install it with: pip install 'rlflow[search]'"
    )
