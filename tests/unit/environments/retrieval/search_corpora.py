"""Corpora, vectors and tiny encoders for tests of retrieval."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np

from rlflow_environments.retrieval.corpus import Passage, make_contents

SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]


def passages(count: int, seed: int = 0) -> list[Passage]:
    """Articles of random words; titles are distinct."""
    generator = random.Random(seed)
    words = ["".join(generator.choices(SYLLABLES, k=generator.randint(2, 4))) for _ in range(800)]

    def article(row: int) -> Passage:
        title = f"{generator.choice(words)} {row}"
        return Passage(
            str(row),
            title,
            make_contents(title, " ".join(generator.choices(words, k=12))),
            f"doc://{row}",
        )

    return [article(row) for row in range(count)]


def read_pages(path: Path) -> dict[str, str]:
    """{url: contents} of a pages.jsonl."""
    return {row["url"]: row["contents"] for row in map(json.loads, path.open(encoding="utf-8"))}


def clustered(count: int, dimensions: int, seed: int = 0) -> np.ndarray:
    """(count, dimensions) float32 unit vectors around 40 centres, as text embeddings lie; a few rows stand there twice."""
    generator = np.random.default_rng(seed)
    centres = generator.standard_normal((40, dimensions))
    vectors = centres[generator.integers(40, size=count)] + 0.7 * generator.standard_normal(
        (count, dimensions)
    )
    vectors[count // 2 : count // 2 + 20] = vectors[:20]
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def brute_force(vectors: np.ndarray, query: np.ndarray, top_k: int) -> list[int]:
    """Rows by exact inner product, ties by row."""
    scores = (vectors.astype(np.float64) * query).sum(axis=1)
    return np.lexsort((np.arange(len(vectors)), -scores))[:top_k].tolist()
