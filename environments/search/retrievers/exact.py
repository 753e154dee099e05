"""Exact nearest neighbours from a fast scan that rounds.

A scan (faiss, torch, a GPU; float32 or less) sums in an order that depends on the size of the batch, and rounds. So it only
proposes candidates. They are scored again, in float64 and in one fixed order, against the vectors as they are stored; and when
a row that was not proposed could still belong to the result (the scan's error is bounded), every row above the bound is asked
for. What a query gets therefore depends on the query and the stored vectors alone: not on the batch, the device, the threads
or the scan's precision.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from rlflow_environments.search.retrievers.base import Ranking, best

SPARE = 8  # proposals beyond top_k: a cut within rounding is rare, and costs a second scan
_ROWS = 4096  # rows scored again at a time: bounds the memory of a result with many near ties


class Stored(Protocol):
    """Vectors by row."""

    def stored(self, rows: np.ndarray) -> np.ndarray:
        """(len(rows), dimensions): the vectors that scores are about."""


class Scan(Stored, Protocol):
    """A fast scan over stored vectors. Scores are inner products, wrong by at most `error_bound`."""

    count: int
    spare: int

    def propose(self, vectors: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
        """(scores, rows), both (B, depth), the best by the scan's own arithmetic, best first. depth <= count."""

    def at_least(self, vector: np.ndarray, threshold: float) -> np.ndarray:
        """Every row whose score by the scan's own arithmetic is at least `threshold`, ascending. vector: (dimensions,)."""

    def error_bound(self, vector: np.ndarray) -> float:
        """How far the scan's score of any row may be from the exact inner product."""


def rank_exactly(scan: Scan, vectors: np.ndarray, top_k: int) -> list[Ranking]:
    """The rows with the largest inner products, best first, ties by row. vectors: (B, dimensions) float32."""
    depth = min(top_k + scan.spare, scan.count)
    scores, rows = scan.propose(vectors, depth)
    return [
        _settle(scan, vector, float(proposed[-1]), candidates, top_k)
        for vector, proposed, candidates in zip(vectors, scores, rows, strict=True)
    ]


def _settle(scan: Scan, vector: np.ndarray, lowest: float, rows: np.ndarray, top_k: int) -> Ranking:
    """The ranking of one query from its candidates; `lowest`: no row that was left out scored above it in the scan."""
    ranking = score_again(scan, vector, np.sort(rows), top_k)
    if len(rows) == scan.count:
        return ranking
    bound = scan.error_bound(vector)
    worst = ranking[-1][1]
    if lowest + bound < worst:
        return ranking
    return score_again(scan, vector, scan.at_least(vector, worst - bound), top_k)


def score_again(scan: Stored, vector: np.ndarray, rows: np.ndarray, top_k: int) -> Ranking:
    """The `top_k` best of `rows` (ascending) by exact scores."""
    if not len(rows):
        return []
    scores = [
        (scan.stored(rows[start : start + _ROWS]).astype(np.float64) * vector).sum(axis=1)
        for start in range(0, len(rows), _ROWS)
    ]
    return best(rows, np.concatenate(scores), top_k)
