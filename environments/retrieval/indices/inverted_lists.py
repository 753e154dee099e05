"""The lists of an IVF index that a query searches."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

_SEQUENTIAL_BATCH = 16  # faiss sums differently for 20 queries and more (distance_compute_blas_threshold)
_FLOAT32 = 2.0**-24


class ListAssignment:
    """Which lists a query searches: the `nprobe` whose centroids have the largest inner products, whatever else is in its
    batch."""

    def __init__(self, faiss: ModuleType, index: Any) -> None:
        """index: an IndexIVF with its nprobe."""
        self._index = index
        self._probes = min(index.nprobe, index.nlist)
        self._centroids = None
        self._largest_norm = 0.0
        # Other kinds may add the scores of the lists to their own, so that these must not depend on the batch either.
        quantizer = faiss.downcast_index(index.quantizer)
        flat = isinstance(quantizer, faiss.IndexFlat) and quantizer.metric_type == faiss.METRIC_INNER_PRODUCT
        if flat and type(index) is faiss.IndexIVFFlat:
            held = faiss.rev_swig_ptr(quantizer.get_xb(), index.nlist * index.d)  # memory of the index
            self._centroids = held.reshape(index.nlist, index.d)
            self._largest_norm = float(np.linalg.norm(self._centroids, axis=1).max())

    def __call__(self, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(numbers of the lists, their scores where the index uses them), both (B, nprobe), for (B, dimensions) vectors."""
        if self._centroids is None:
            return self._asked(vectors)
        if self._probes == len(self._centroids):
            return _unscored(np.tile(np.arange(self._probes), (len(vectors), 1)))
        if len(vectors) == 1:
            scores = (self._centroids @ vectors[0])[None]
        else:
            scores = _products(self._centroids, vectors).T
        order = np.argpartition(scores, -self._probes - 1, axis=1)[:, -self._probes - 1 :]
        near, lists = np.take_along_axis(scores, order, axis=1), order[:, 1:]
        # A product of matrices sums in an order that depends on its shape: where that may decide, exact products do.
        last = near[:, 1:].min(axis=1)
        bounds = np.linalg.norm(vectors, axis=1) * 1.01 * vectors.shape[1] * _FLOAT32 * self._largest_norm
        for place in np.flatnonzero(last - near[:, 0] <= 2 * bounds):
            close = np.flatnonzero(scores[place] >= last[place] - 2 * bounds[place])
            exact = (self._centroids[close].astype(np.float64) * vectors[place]).sum(axis=1)
            lists[place] = close[np.lexsort((close, -exact))[: self._probes]]
        return _unscored(np.sort(lists, axis=1))

    def _asked(self, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """By the index's own quantizer."""
        blocks = [vectors[start : start + _SEQUENTIAL_BATCH] for start in range(0, len(vectors), _SEQUENTIAL_BATCH)]
        scores, lists = zip(*(self._index.quantizer.search(block, self._probes) for block in blocks), strict=True)
        return np.concatenate(lists), np.concatenate(scores)


def _products(centroids: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """(lists, B) inner products."""
    import torch

    from rlflow.matmul import linear

    with torch.no_grad():
        return linear(torch.from_numpy(centroids), torch.from_numpy(np.ascontiguousarray(vectors))).numpy()


def _unscored(lists: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return lists, np.zeros(lists.shape, np.float32)
