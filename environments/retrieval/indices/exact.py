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

from rlflow_environments.retrieval.indices.base import Ranking, best

OVERFETCH = 8  # proposals beyond top_k: a cut within rounding is rare, and costs a second scan
_ROWS = 4096  # rows scored again at a time: bounds the memory of a result with many near ties


class StoredVectors(Protocol):
    """Vectors by row."""

    def stored(self, rows: np.ndarray) -> np.ndarray:
        """(len(rows), dimensions): the vectors that scores are about."""


class Scan(StoredVectors, Protocol):
    """A fast scan over stored vectors. Scores are inner products, wrong by at most `error_bound`."""

    count: int
    overfetch: int

    def propose(self, vectors: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
        """(scores, rows), both (B, depth), the best by the scan's own arithmetic, best first. depth <= count. Row -1: the scan
        reaches no further rows."""

    def at_least(self, vector: np.ndarray, score: float) -> np.ndarray:
        """Rows, ascending: all in reach whose exact inner product is `score` or more, and others near by. vector:
        (dimensions,)."""

    def error_bound(self, vectors: np.ndarray) -> np.ndarray:
        """How far the scan's score of any row may be from the exact inner product, for each of (B, dimensions) vectors."""


def rank_exactly(scan: Scan, vectors: np.ndarray, top_k: int) -> list[Ranking]:
    """The rows with the largest inner products, best first, ties by row. vectors: (B, dimensions) float32."""
    depth = min(top_k + scan.overfetch, scan.count)
    scores, rows = scan.propose(vectors, depth)
    if len(vectors) == 1:
        return [_settle_one(scan, vectors, scores[0], rows[0], top_k)]
    rankings: list[Ranking] = []
    step = max(1, _ROWS // depth)
    for start in range(0, len(vectors), step):
        part = slice(start, start + step)
        rankings += _settle(scan, vectors[part], scores[part], rows[part], top_k)
    return rankings


def _settle(scan: Scan, vectors: np.ndarray, scores: np.ndarray, rows: np.ndarray, top_k: int) -> list[Ranking]:
    """The rankings of queries, (B, dimensions), from what the scan proposes for them, (B, depth) each."""
    bounds = scan.error_bound(vectors)
    exact = np.full(rows.shape, -np.inf)
    chosen = rows >= 0
    chosen[:, top_k:] = False
    _score(scan, vectors, rows, chosen, exact)
    # Another candidate can only be among the best if the scan, and what it may have got wrong, reaches the worst of these.
    reached = scores >= (exact[:, :top_k].min(axis=1) - bounds)[:, None]
    _score(scan, vectors, rows, (rows >= 0) & reached & ~chosen, exact)
    order = np.lexsort((rows, -exact))[:, :top_k]
    ordered = [np.take_along_axis(found, order, axis=1) for found in (rows, exact)]
    rankings = [
        [(row, score) for row, score in zip(*found, strict=True) if row >= 0]
        for found in zip(*(found.tolist() for found in ordered), strict=True)
    ]
    # The same holds for rows that were not proposed: the scan puts them at most where the last proposal is.
    unsettled = (rows[:, -1] >= 0) & (scores[:, -1] >= ordered[1][:, -1] - bounds)
    if rows.shape[1] < scan.count:
        for place in np.flatnonzero(unsettled):
            near = scan.at_least(vectors[place], rankings[place][-1][1])
            rankings[place] = score_again(scan, vectors[place], near, top_k)
    return rankings


def _settle_one(scan: Scan, vectors: np.ndarray, scores: np.ndarray, rows: np.ndarray, top_k: int) -> Ranking:
    """As `_settle` for one query, (1, dimensions), with a third of its calls."""
    bound = scan.error_bound(vectors)[0]
    count = int((rows >= 0).sum())  # they come first
    exact = score_rows(scan, vectors[0], rows[: min(top_k, count)]) if count else np.zeros(0)
    reached = int((scores[:count] >= exact.min(initial=np.inf) - bound).sum()) if count > top_k else 0
    if reached > top_k:
        exact = np.concatenate([exact, score_rows(scan, vectors[0], rows[top_k:reached])])
    near = rows[: len(exact)]
    order = np.lexsort((near, -exact))[:top_k]
    ranking = list(zip(near[order].tolist(), exact[order].tolist(), strict=True))
    if count == len(rows) < scan.count and scores[-1] >= ranking[-1][1] - bound:
        return score_again(scan, vectors[0], scan.at_least(vectors[0], ranking[-1][1]), top_k)
    return ranking


def _score(scan: Scan, vectors: np.ndarray, rows: np.ndarray, chosen: np.ndarray, exact: np.ndarray) -> None:
    """Fills in the exact scores of the chosen candidates. rows, chosen, exact: (B, depth)."""
    queries, columns = chosen.nonzero()
    for start in range(0, len(queries), _ROWS):
        places = queries[start : start + _ROWS], columns[start : start + _ROWS]
        exact[places] = _products(scan.stored(rows[places]), vectors[places[0]])


def score_again(scan: StoredVectors, vector: np.ndarray, rows: np.ndarray, top_k: int) -> Ranking:
    """The `top_k` best of `rows` (ascending) by exact scores."""
    if not len(rows):
        return []
    return best(rows, score_rows(scan, vector, rows), top_k)


def score_rows(scan: StoredVectors, vector: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The exact scores of some rows, (len(rows),) float64."""
    return np.concatenate(
        [_products(scan.stored(rows[start : start + _ROWS]), vector) for start in range(0, len(rows), _ROWS)]
    )


def _products(vectors: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Inner products in float64, each summed in the same order whatever the number of rows."""
    return (vectors.astype(np.float64) * others).sum(axis=1)
