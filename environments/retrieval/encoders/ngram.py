"""The encoder that needs no download: hashed word and character n-grams, weighted by idf, as unit
vectors."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlflow.errors import ConfigError, DataError
from rlflow.storage.files import write_text
from rlflow.values import PositiveInt, Share
from rlflow_environments.retrieval.corpus import Passage

# Scripts without spaces between words count character by character.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uac00-\ud7af"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")

_CHUNK = 1 << 18  # characters of the texts that are encoded at a time: about a million features
_CHUNK_TEXTS = 1024
_CACHED_WORDS = 100_000


def split_words(text: str) -> list[str]:
    """The words of a text, lower-cased; digits count as words, punctuation does not."""
    return _WORD.findall(text.lower())


class NgramEncoder:
    """Feature hashing (Weinberger et al. 2009) of words and of their character n-grams into
    `dimensions` signed buckets.

    A word is a unit vector: one part for the whole word, one for its n-grams, so that a misspelled
    name still lies close. A text is the sum of its words weighted by idf * (1 + ln tf). A passage
    is `title_weight` of its title's unit vector and 1 - title_weight of its body's, normalized: an
    article about a name lies closer to that name than articles that mention it. Deterministic: a
    text's vector depends on the corpus and on the text alone, bit for bit, not on the batch.
    """

    corpus = ""
    """SHA-256 of the corpus whose words were counted, of one that was loaded."""

    def __init__(
        self,
        passages: Sequence[Passage],
        *,
        dimensions: PositiveInt = 512,
        title_weight: Share = 0.5,
        ngram_weight: Share = 0.3,
        ngram_sizes: Sequence[PositiveInt] = (3, 4),
        buckets_per_word: PositiveInt = 4,
    ) -> None:
        """Counts in how many passages each word occurs. Raises ConfigError for no ngram_sizes."""
        if not ngram_sizes:
            raise ConfigError("retriever.ngram_sizes: expected at least one size, found none.")
        self.dimensions = dimensions
        self.options = {
            "dimensions": dimensions,
            "title_weight": title_weight,
            "ngram_weight": ngram_weight,
            "ngram_sizes": list(ngram_sizes),
            "buckets_per_word": buckets_per_word,
        }
        self._title_weight = title_weight
        self._ngram_weight = ngram_weight
        self._ngram_sizes = tuple(ngram_sizes)
        self._buckets_per_word = buckets_per_word
        self._features = functools.lru_cache(_CACHED_WORDS)(self._word_features)
        self._passage_count = len(passages)
        self._document_frequency: Counter[str] = Counter()
        for passage in passages:
            self._document_frequency.update(set(split_words(passage.contents)))

    @classmethod
    def load(cls, path: str | Path) -> NgramEncoder:
        """The encoder that `save` wrote. Raises DataError: missing or damaged file."""
        try:
            state = json.loads(Path(path).read_bytes())
            encoder = cls([], **state["options"])
            encoder._passage_count = int(state["passages"])
            encoder._document_frequency = Counter(state["document_frequency"])
            encoder.corpus = state.get("corpus", "")
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as problem:
            raise DataError(
                f"{path}: expected the counts of a hashed encoder, found {problem}. Delete the "
                "folder and build the index again."
            ) from None
        return encoder

    def save(self, path: str | Path, corpus: str) -> None:
        """Writes the options and the counts as JSON: what the corpus contributes to a vector.
        corpus: SHA-256 of its file."""
        state = {
            "corpus": corpus,
            "options": self.options,
            "passages": self._passage_count,
            "document_frequency": dict(sorted(self._document_frequency.items())),
        }
        write_text(path, json.dumps(state))

    @property
    def description(self) -> dict[str, Any]:
        """See Encoder."""
        counts = json.dumps(
            [self.options, self._passage_count, sorted(self._document_frequency.items())]
        )
        return {
            "family": "hashed",
            **self.options,
            "sha256": hashlib.sha256(counts.encode()).hexdigest(),
        }

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        """(N, dimensions) float32, unit rows; a query without any word is a zero row."""
        vectors = [self._encode(chunk) for chunk in _chunks(queries, len)]
        return np.concatenate([np.zeros((0, self.dimensions), np.float32), *vectors])

    def encode_passages(self, passages: Sequence[Passage]) -> np.ndarray:
        """(N, dimensions) float32, unit rows."""
        vectors = np.zeros((len(passages), self.dimensions), np.float32)
        start = 0
        for chunk in _chunks(passages, lambda passage: len(passage.contents)):
            titles = self._encode([passage.title for passage in chunk])
            bodies = self._encode([passage.body for passage in chunk])
            mixed = self._title_weight * titles + (1 - self._title_weight) * bodies
            vectors[start : start + len(chunk)] = _normalize(mixed)
            start += len(chunk)
        return vectors

    def _encode(self, texts: Sequence[str]) -> np.ndarray:
        """One chunk: every feature of every word, summed into its text's bucket in the order of the
        text."""
        counts = [Counter(split_words(text)) for text in texts]
        features = [self._features(word) for count in counts for word in count]
        if not features:
            return np.zeros((len(texts), self.dimensions), np.float32)
        sizes = [len(buckets) for buckets, _ in features]
        factors = [1 + math.log(times) for count in counts for times in count.values()]
        texts_of_words = np.repeat(np.arange(len(texts)), [len(count) for count in counts])
        buckets = np.repeat(texts_of_words * self.dimensions, sizes) + np.concatenate(
            [b for b, _ in features]
        )
        values = np.repeat(factors, sizes) * np.concatenate([v for _, v in features])
        summed = np.bincount(buckets, values, minlength=len(texts) * self.dimensions)
        return _normalize(summed.reshape(len(texts), self.dimensions))

    def _idf(self, word: str) -> float:
        """ln(1 + (N - n + 0.5) / (n + 0.5)), as in BM25; largest for a word that the corpus does
        not know."""
        occurs = self._document_frequency[word]
        return math.log(1 + (self._passage_count - occurs + 0.5) / (occurs + 0.5))

    def _word_features(self, word: str) -> tuple[np.ndarray, np.ndarray]:
        """(buckets, values) of a word, idf times a unit vector: itself in several buckets, each of
        its n-grams in one."""
        ngrams = [f"#{ngram}" for ngram in self._ngrams(word)]
        ngram_weight = self._ngram_weight if ngrams else 0.0
        whole = [f"{copy}={word}" for copy in range(self._buckets_per_word)]
        sizes = np.concatenate(
            [
                np.full(len(whole), math.sqrt((1 - ngram_weight) / len(whole))),
                np.full(len(ngrams), math.sqrt(ngram_weight / max(1, len(ngrams)))),
            ]
        )
        hashes = np.array([_hash(feature) for feature in whole + ngrams], dtype=np.uint64)
        signs = np.where(hashes >> np.uint64(63), 1.0, -1.0)
        buckets, places = np.unique(
            (hashes & np.uint64(2**62 - 1)) % np.uint64(self.dimensions), return_inverse=True
        )
        values = np.bincount(places, signs * sizes)
        # Features of opposite signs may share their buckets
        length = math.sqrt(float((values * values).sum())) or 1.0
        return buckets.astype(np.int64), self._idf(word) / length * values

    def _ngrams(self, word: str) -> Iterator[str]:
        marked = f"^{word}$"
        for size in self._ngram_sizes:
            for start in range(len(marked) - size + 1):
                yield marked[start : start + size]


def _hash(feature: str) -> int:
    # Python's own hash differs from process to process. A sampled text may hold lone surrogates.
    return int.from_bytes(
        hashlib.blake2b(feature.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little"
    )


def _normalize(vectors: np.ndarray) -> np.ndarray:
    """Rows of unit length as float32; zero rows stay zero."""
    norms = np.sqrt((vectors * vectors).sum(axis=1, keepdims=True))
    return (vectors / np.where(norms > 0, norms, 1)).astype(np.float32)


def _chunks(items: Sequence, size_of: Callable[[Any], int]) -> Iterator[Sequence]:
    """Runs of neighbours of bounded size, at least one each."""
    start = size = 0
    for end, item in enumerate(items):
        size += size_of(item)
        if end > start and (size > _CHUNK or end - start == _CHUNK_TEXTS):
            yield items[start:end]
            start, size = end, size_of(item)
    if start < len(items):
        yield items[start:]
