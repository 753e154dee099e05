"""BM25."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np

from rlflow.errors import ConfigError, DataError, install_command, needing
from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.retrieval.encoders.ngram import split_words
from rlflow_environments.retrieval.indices.base import Ranking, best

_EMPTY = "no_words"


class BM25Index:
    """Okapi BM25 as Lucene scores it (bm25s). Only passages that share a word with the query are ranked.

    The words of a title count `title_weight` times more, before saturation (the simple form of BM25F: Robertson, Zaragoza and
    Taylor 2004), so that an article about a name comes before articles that mention it.
    """

    def __init__(self, corpus: Iterable[Passage], *, k1: float = 1.5, b: float = 0.75, title_weight: int = 8) -> None:
        """Builds the index in memory. Raises MissingPackageError without bm25s, ConfigError for values out of range."""
        if k1 < 0 or not 0 <= b <= 1 or title_weight < 0:
            raise ConfigError(
                f"retriever bm25: expected k1 >= 0, b from 0 to 1, title_weight >= 0, found {k1}, {b}, {title_weight}."
            )
        bm25s = _import_bm25s()
        self._vocabulary: dict[str, int] = {}
        rows = [self._learn(split_words(p.contents) + split_words(p.title) * title_weight) for p in corpus]
        self._index = None
        if self._vocabulary:  # a corpus without a single word matches nothing
            self._index = bm25s.BM25(k1=k1, b=b, method="lucene")
            self._index.index((rows, self._vocabulary), create_empty_token=False, show_progress=False)

    @classmethod
    def load(cls, folder: Path, *, mmap: bool = True) -> BM25Index:
        """What `save` wrote; with `mmap` its scores stay on disk. Raises DataError: missing or damaged files."""
        bm25s = _import_bm25s()
        index = cls([])
        if (folder / _EMPTY).is_file():
            return index
        try:
            index._index = bm25s.BM25.load(folder, mmap=mmap, load_corpus=False, show_progress=False)
        except (OSError, ValueError, KeyError) as problem:
            raise DataError(f"{folder}: expected a BM25 index, found {problem}. Build it again.") from None
        index._vocabulary = index._index.vocab_dict
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

    def _learn(self, words: list[str]) -> list[int]:
        return [self._vocabulary.setdefault(word, len(self._vocabulary)) for word in words]

    def _rank(self, query: str, top_k: int) -> Ranking:
        words = [self._vocabulary[word] for word in split_words(query) if word in self._vocabulary]
        if not words or self._index is None:
            return []
        scores = self._index.get_scores_from_ids(words)
        matching = np.flatnonzero(scores > 0)
        return best(matching, scores[matching], top_k)


def _import_bm25s() -> ModuleType:
    with needing("retriever bm25", install_command("search")):
        import bm25s
    return bm25s
