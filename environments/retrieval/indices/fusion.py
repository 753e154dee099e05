"""Fusion of rankings."""

from __future__ import annotations

from collections.abc import Sequence

from rlflow_environments.retrieval.indices.base import Index, Ranking


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
