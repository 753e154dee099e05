"""The encoder that needs no download: hashed word and character n-grams, weighted by idf, as unit vectors."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlflow.errors import ConfigError, DataError
from rlflow_environments.search.formats import Passage

# Scripts without spaces between words count character by character.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uac00-\ud7af"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")

_CHUNK = 1 << 17  # values of the texts that are encoded at a time: bounds the dense rows of their words
_CACHED_WORDS = 100_000


def split_words(text: str) -> list[str]:
    """The words of a text, lower-cased; digits count as words, punctuation does not."""
    return _WORD.findall(text.lower())


class NgramEncoder:
    """Feature hashing (Weinberger et al. 2009) of words and of their character n-grams into `dimensions` signed buckets.

    A word is a unit vector: one part for the whole word, one for its n-grams, so that a misspelled name still lies close.
    A text is the sum of its words weighted by idf * (1 + ln tf). A passage is `title_weight` of its title's unit vector and
    1 - title_weight of its body's, normalized: an article about a name lies closer to that name than articles that mention it.
    Deterministic: a text's vector depends on the corpus and on the text alone, bit for bit, not on the batch.
    """

    unit_vectors = True

    def __init__(
        self,
        passages: Sequence[Passage],
        *,
        dimensions: int = 512,
        title_weight: float = 0.5,
        ngram_weight: float = 0.3,
        ngram_sizes: Sequence[int] = (3, 4),
        buckets_per_word: int = 4,
    ) -> None:
        """Counts in how many passages each word occurs. Raises ConfigError for values out of range."""
        if dimensions < 1 or buckets_per_word < 1 or not ngram_sizes or min(ngram_sizes) < 1:
            raise ConfigError(
                "retriever: dimensions, buckets_per_word and every one of ngram_sizes must be at least 1, found "
                f"{dimensions}, {buckets_per_word}, {list(ngram_sizes)}."
            )
        if not (0 <= title_weight <= 1 and 0 <= ngram_weight <= 1):
            raise ConfigError(
                f"retriever: title_weight and ngram_weight must be from 0 to 1, found {title_weight} and {ngram_weight}."
            )
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
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise DataError(
                f"{path}: expected the counts of a hashed encoder, found {problem}. Build the index again."
            ) from None
        return encoder

    @staticmethod
    def counted(path: str | Path) -> tuple[str, dict[str, Any]]:
        """(SHA-256 of the corpus, options) of a file that `save` wrote."""
        state = json.loads(Path(path).read_bytes())
        return state["corpus"], state["options"]

    def save(self, path: str | Path, corpus: str) -> None:
        """Writes the options and the counts as JSON: what the corpus contributes to a vector. corpus: SHA-256 of its file."""
        aside = Path(f"{path}.partial")
        state = {
            "corpus": corpus,
            "options": self.options,
            "passages": self._passage_count,
            "document_frequency": dict(sorted(self._document_frequency.items())),
        }
        aside.write_text(json.dumps(state), encoding="ascii")
        aside.replace(path)

    @property
    def description(self) -> dict[str, Any]:
        """See Encoder."""
        counts = json.dumps([self.options, self._passage_count, sorted(self._document_frequency.items())])
        return {"family": "hashed", **self.options, "sha256": hashlib.sha256(counts.encode()).hexdigest()}

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        """(N, dimensions) float32, unit rows; a query without any word is a zero row."""
        return np.concatenate([np.zeros((0, self.dimensions), np.float32), *map(self._encode, _chunks(queries, self.dimensions))])

    def encode_passages(self, passages: Sequence[Passage]) -> np.ndarray:
        """(N, dimensions) float32, unit rows."""
        vectors = np.zeros((len(passages), self.dimensions), np.float32)
        start = 0
        for chunk in _chunks(passages, self.dimensions):
            titles = self._encode([passage.title for passage in chunk])
            bodies = self._encode([passage.body for passage in chunk])
            mixed = self._title_weight * titles + (1 - self._title_weight) * bodies
            vectors[start : start + len(chunk)] = _normalize(mixed)
            start += len(chunk)
        return vectors

    def _encode(self, texts: Sequence[str]) -> np.ndarray:
        """One chunk: the dense rows of its distinct words are made once, then summed per text."""
        counts = [Counter(split_words(text)) for text in texts]
        row_of = {word: row for row, word in enumerate(dict.fromkeys(word for count in counts for word in count))}
        if not row_of:
            return np.zeros((len(texts), self.dimensions), np.float32)
        rows = torch.tensor([row_of[word] for count in counts for word in count])
        weights = torch.tensor(
            [self._idf(word) * (1 + math.log(times)) for count in counts for word, times in count.items()],
            dtype=torch.float32,
        )
        ends = np.cumsum([len(count) for count in counts])
        starts = torch.from_numpy(np.concatenate([[0], ends[:-1]]))
        words = torch.from_numpy(self._word_vectors(list(row_of)))
        summed = torch.nn.functional.embedding_bag(rows, words, starts, mode="sum", per_sample_weights=weights)
        return _normalize(summed.numpy())

    def _idf(self, word: str) -> float:
        """ln(1 + (N - n + 0.5) / (n + 0.5)), as in BM25; largest for a word that the corpus does not know."""
        occurs = self._document_frequency[word]
        return math.log(1 + (self._passage_count - occurs + 0.5) / (occurs + 0.5))

    def _word_vectors(self, words: list[str]) -> np.ndarray:
        """(len(words), dimensions) float32, unit rows."""
        features = [self._features(word) for word in words]
        owners = np.repeat(np.arange(len(words)), [len(buckets) for buckets, _ in features])
        flat = owners * self.dimensions + np.concatenate([buckets for buckets, _ in features])
        values = np.concatenate([values for _, values in features])
        dense = np.bincount(flat, weights=values, minlength=len(words) * self.dimensions)
        return _normalize(dense.reshape(len(words), self.dimensions).astype(np.float32))

    def _word_features(self, word: str) -> tuple[np.ndarray, np.ndarray]:
        """(buckets, signed values) of a word: itself in several buckets, each of its n-grams in one."""
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
        buckets = (hashes & np.uint64(2**62 - 1)) % np.uint64(self.dimensions)
        return buckets.astype(np.int64), signs * sizes

    def _ngrams(self, word: str) -> Iterator[str]:
        marked = f"^{word}$"
        for size in self._ngram_sizes:
            for start in range(len(marked) - size + 1):
                yield marked[start : start + size]


def _hash(feature: str) -> int:
    # Python's own hash differs from process to process. A sampled text may hold lone surrogates.
    return int.from_bytes(hashlib.blake2b(feature.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def _normalize(vectors: np.ndarray) -> np.ndarray:
    """Rows of unit length; zero rows stay zero."""
    norms = np.sqrt((vectors * vectors).sum(axis=1, keepdims=True))
    return (vectors / np.where(norms > 0, norms, 1)).astype(np.float32)


def _chunks(items: Sequence, dimensions: int) -> Iterator[Sequence]:
    size = max(1, _CHUNK // dimensions)
    return (items[start : start + size] for start in range(0, len(items), size))
