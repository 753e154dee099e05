"""BM25."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np

from rlflow.errors import ConfigError, DataError, install_command, needing
from rlflow.values import NonNegativeFloat, NonNegativeInt, Share
from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.retrieval.encoders.ngram import split_words
from rlflow_environments.retrieval.indices.base import (
    CorpusRetriever,
    Ranking,
    RetrieverFacts,
    best,
    with_facts,
)
from rlflow_environments.retrieval.indices.folder import BM25, open_folder, retriever_of

_EMPTY = "no_words"


class BM25Index:
    """Okapi BM25 as Lucene scores it (bm25s). Only passages that share a word with the query are
    ranked.

    The words of a title count `title_weight` times more, before saturation (the simple form of
    BM25F: Robertson, Zaragoza and Taylor 2004): an article about a name comes before articles that
    mention it.
    """

    def __init__(
        self, corpus: Iterable[Passage], *, k1: float = 1.5, b: float = 0.75, title_weight: int = 8
    ) -> None:
        """Builds the index in memory. Raises MissingPackageError without bm25s."""
        bm25s = _import_bm25s()
        self._vocabulary: dict[str, int] = {}
        rows = [self._learn(passage, title_weight) for passage in corpus]
        self._index = None
        if self._vocabulary:  # a corpus without a single word matches nothing
            self._index = bm25s.BM25(k1=k1, b=b, method="lucene")
            tokens = (rows, self._vocabulary)
            self._index.index(tokens, create_empty_token=False, show_progress=False)

    @classmethod
    def load(cls, folder: Path) -> BM25Index:
        """What `save` wrote; its scores stay on disk. Raises DataError."""
        bm25s = _import_bm25s()
        index = cls([])
        if (folder / _EMPTY).is_file():
            return index
        try:
            loaded = bm25s.BM25.load(folder, mmap=True, load_corpus=False, show_progress=False)
        except (OSError, ValueError, KeyError) as problem:
            raise DataError(
                f"{folder}: expected a BM25 index, found {problem}. Build it again."
            ) from None
        index._index, index._vocabulary = loaded, loaded.vocab_dict
        return index

    def save(self, folder: Path) -> None:
        """Writes the scores and the vocabulary."""
        folder.mkdir(parents=True, exist_ok=True)
        if self._index is None:
            (folder / _EMPTY).touch()
        else:
            self._index.save(folder, show_progress=False)

    def rank(self, queries: Sequence[str], top_k: int) -> list[Ranking]:
        return [self._rank(query, top_k) for query in queries]

    def _learn(self, passage: Passage, title_weight: int) -> list[int]:
        words = split_words(passage.contents) + split_words(passage.title) * title_weight
        return [self._vocabulary.setdefault(word, len(self._vocabulary)) for word in words]

    def _rank(self, query: str, top_k: int) -> Ranking:
        known = self._vocabulary
        words = [known[word] for word in split_words(query) if word in known]
        if not words or self._index is None:
            return []
        scores = self._index.get_scores_from_ids(words)
        matching = np.flatnonzero(scores > 0)
        return best(matching, scores[matching], top_k)


@with_facts(RetrieverFacts(package="bm25s"))
def bm25_retriever(
    corpus: Sequence[Passage],
    *,
    path: str | None = None,
    k1: NonNegativeFloat | None = None,
    b: Share | None = None,
    title_weight: NonNegativeInt | None = None,
) -> CorpusRetriever:
    """BM25 with bm25s. path: an index folder of kind bm25, whose parameters are stored there;
    without one the index is built in memory (see BM25Index for k1, b and title_weight)."""
    options = {"k1": k1, "b": b, "title_weight": title_weight}
    given = {name: value for name, value in options.items() if value is not None}
    if path is None:
        return CorpusRetriever(corpus, BM25Index(corpus, **given))
    if given:
        raise ConfigError(
            f"retriever.{next(iter(given))}: decided when the index was built; remove it, or "
            "remove retriever.path."
        )
    folder = Path(path).expanduser()
    meta = open_folder(folder, corpus)
    if meta.kind != "bm25":
        raise ConfigError(
            f"{folder}: an index of kind {meta.kind}, expected bm25. Set retriever.name to "
            f"{retriever_of(meta)}."
        )
    return CorpusRetriever(corpus, BM25Index.load(folder / BM25))


def _import_bm25s() -> ModuleType:
    with needing("retriever bm25", install_command("search")):
        import bm25s
    return bm25s
