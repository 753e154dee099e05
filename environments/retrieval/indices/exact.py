"""Exact nearest neighbours from a fast scan that rounds.

A scan (faiss, torch, a GPU; float32 or less) sums in an order that depends on the size of the
batch, and rounds. So it only proposes candidates, which are scored again against the stored
vectors, in float64 and in one fixed order. Where a row that was not proposed could still belong to
the result (the scan's error is bounded), every row above the bound is scored. What a query gets
therefore depends on the query and the stored vectors alone: not on the batch, the device, the
threads or the scan's precision.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from rlflow_environments.retrieval.indices.base import Ranking, best

OVERFETCH = 8  # proposals beyond top_k: a cut within rounding is rare, and costs a second scan
_ROWS = 4096  # rows scored again at a time: bounds the memory of a result with many near ties


class Scan(Protocol):
    """A fast scan over stored vectors, by inner products that are wrong by at most
    `error_bound`."""

    count: int
    overfetch: int

    def propose(self, vectors: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
        """(scores, rows), both (B, depth): the best by the scan's own arithmetic, best first."""

    def at_least(self, vector: np.ndarray, score: float) -> np.ndarray:
        """All rows whose exact score is `score` or more, and some near by, ascending. vector:
        (D,)."""

    def stored(self, rows: np.ndarray) -> np.ndarray:
        """(len(rows), D): the vectors that scores are about."""

    def error_bound(self, vectors: np.ndarray) -> np.ndarray:
        """(B,): how far the scan's score of any row may be from the exact inner product."""


def rank_exactly(scan: Scan, vectors: np.ndarray, top_k: int) -> list[Ranking]:
    """The rows with the largest inner products, best first, ties by row. vectors: (B, D)
    float32."""
    depth = min(top_k + scan.overfetch, scan.count)
    proposals = zip(vectors, *scan.propose(vectors, depth), scan.error_bound(vectors), strict=True)
    rankings = []
    for vector, scores, rows, bound in proposals:
        ranking = score_again(scan, vector, np.sort(rows), top_k)
        # The scan puts rows that were not proposed at most where the last proposal is.
        if depth < scan.count and scores[-1] >= ranking[-1][1] - bound:
            ranking = score_again(scan, vector, scan.at_least(vector, ranking[-1][1]), top_k)
        rankings.append(ranking)
    return rankings


def score_again(scan: Scan, vector: np.ndarray, rows: np.ndarray, top_k: int) -> Ranking:
    """The `top_k` best of `rows` (ascending), each score summed in float64 in the same order."""
    scores = [
        (scan.stored(rows[start : start + _ROWS]).astype(np.float64) * vector).sum(axis=1)
        for start in range(0, len(rows), _ROWS)
    ]
    return best(rows, np.concatenate(scores), top_k) if scores else []
