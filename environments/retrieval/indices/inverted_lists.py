"""The lists of an IVF index: which of them a query searches, and a scan of them that reads a quarter of the bytes."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

from rlflow.errors import DataError

_SEQUENTIAL_BATCH = 16  # faiss sums differently for 20 queries and more (distance_compute_blas_threshold)
_OVERFETCH = 61
_CHECKED = 16  # vectors
_INT8 = 127
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


class Int8Lists:
    """The scan (see `exact`) of an IVF index of float32 vectors: it proposes from a copy in eight bits per value.

    A query searches the lists that it would search in the index, and gets the best of their float32 vectors. Queries, and how far
    vectors are from the middle of each dimension's values, are rounded to whole numbers in units that each dimension has for
    itself; faiss multiplies and sums those exactly. `overfetch` proposals beyond top_k are enough for most queries: rounding
    misjudges the score of unit vectors by 0.04 at most, in 384 dimensions. The others search the index itself.
    """

    overfetch = _OVERFETCH

    def __init__(self, faiss: ModuleType, index: Any, assign: ListAssignment) -> None:
        """index: an IndexIVFFlat; it is read list by list, twice. Memory: a byte per value and 16 per vector.

        Raises DataError where faiss does not multiply whole numbers as expected.
        """
        self._index = index
        self._assign = assign
        self.count, self.dimensions = int(index.ntotal), int(index.d)
        lowest, highest = _ranges(faiss, index)
        self._middle = (lowest + highest) / 2
        self._units = np.where(highest > lowest, highest - lowest, 1) / np.float32(2 * _INT8)
        kind, metric = faiss.ScalarQuantizer.QT_8bit_direct_signed, faiss.METRIC_INNER_PRODUCT
        self._copy = faiss.IndexIVFScalarQuantizer(index.quantizer, index.d, index.nlist, kind, metric, False)
        self._copy.own_fields = False  # the quantizer is the index's
        self._copy.is_trained = True
        self._copy.ntotal, self._copy.nprobe = index.ntotal, index.nprobe
        self._copy.parallel_mode = index.parallel_mode
        self._largest_norm = self._largest_rounding = self._largest_held = 0.0
        for number, ids, vectors in _lists(faiss, index):
            held = self._held(vectors)
            codes = self._copy.sq.compute_codes(held)
            self._copy.invlists.add_entries(number, len(ids), faiss.swig_ptr(ids), faiss.swig_ptr(codes))
            self._largest_norm = max(self._largest_norm, _longest(vectors))
            self._largest_rounding = max(self._largest_rounding, _longest(vectors - self._middle - held * self._units))
            self._largest_held = max(self._largest_held, _longest(held))
        index.parallel_mode = 0  # the only one that searches by range
        index.make_direct_map()  # where the vector of a row lies
        self._check()

    def propose(self, vectors: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
        """See Scan."""
        whole, units = self._rounded(vectors)
        scores, rows = self._copy.search_preassigned(whole, depth, *self._assign(vectors))
        return scores * units.astype(np.float64) + (vectors @ self._middle.astype(np.float64))[:, None], rows

    def at_least(self, vector: np.ndarray, score: float) -> np.ndarray:
        """See Scan."""
        query = vector[None]
        radius = np.float32(score - self._summing_bound(query)[0])
        least = float(np.nextafter(radius, np.float32(-np.inf)))  # faiss keeps what lies above
        _, _, rows = self._index.range_search_preassigned(query, least, *self._assign(query))
        return np.sort(rows)

    def stored(self, rows: np.ndarray) -> np.ndarray:
        """See Scan."""
        return self._index.reconstruct_batch(rows)

    def error_bound(self, vectors: np.ndarray) -> np.ndarray:
        """|q.x - scan| <= |q||x - x'| + |q - q'||x'| (Cauchy-Schwarz), x' and q' being rounded, the second part in the units of
        the dimensions; and the rounding of the result."""
        whole, units = self._rounded(vectors)
        of_queries = np.linalg.norm(vectors * self._units - whole * units, axis=1) * self._largest_held
        of_vectors = np.linalg.norm(vectors, axis=1) * self._largest_rounding
        return 1.01 * (of_vectors + of_queries) + self._summing_bound(vectors)

    def _held(self, vectors: np.ndarray) -> np.ndarray:
        """What the copy holds of (n, dimensions) vectors: whole numbers from -127 to 127 as float32."""
        return np.clip(np.rint((vectors - self._middle) / self._units), -_INT8, _INT8)

    def _rounded(self, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(whole numbers, (B, dimensions), the unit of each row of them, (B, 1)), both float32."""
        scaled = vectors * self._units
        units = np.abs(scaled).max(axis=1, keepdims=True) / _INT8
        return np.rint(scaled / np.where(units > 0, units, 1)), units

    def _summing_bound(self, vectors: np.ndarray) -> np.ndarray:
        """d u |q||x| for a sum of d products in any order."""
        return np.linalg.norm(vectors, axis=1) * 1.01 * self.dimensions * _FLOAT32 * self._largest_norm

    def _check(self) -> None:
        """Compares scores of a few vectors with whole-number arithmetic."""
        rows = np.unique(np.linspace(0, self.count - 1, _CHECKED).astype(np.int64))
        vectors = self.stored(rows)
        whole, units = self._rounded(vectors)
        scores, found = (result[:, 0] for result in self.propose(vectors, 1))
        some = found >= 0  # a list may be empty
        products = (whole[some] * self._held(self.stored(found[some]))).sum(axis=1, dtype=np.float64)
        expected = products * units[some, 0] + vectors[some] @ self._middle.astype(np.float64)
        if not np.allclose(scores[some], expected, rtol=1e-5):
            raise DataError(
                "retriever faiss.dtype: this build of faiss multiplies eight-bit values otherwise than the scan in int8 expects. "
                "Set dtype: float32, and report the version of faiss and the processor."
            )


def _products(centroids: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """(lists, B) inner products."""
    import torch

    from rlflow.matmul import linear

    with torch.no_grad():
        return linear(torch.from_numpy(centroids), torch.from_numpy(np.ascontiguousarray(vectors))).numpy()


def _unscored(lists: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return lists, np.zeros(lists.shape, np.float32)


def _lists(faiss: ModuleType, index: Any) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(number, ids, (n, dimensions) float32 vectors) of every list that holds anything; views of the index's memory."""
    held = index.invlists
    for number in range(index.nlist):
        size = held.list_size(number)
        if size:
            codes = faiss.rev_swig_ptr(held.get_codes(number), size * index.code_size)
            yield number, faiss.rev_swig_ptr(held.get_ids(number), size), codes.view(np.float32).reshape(size, index.d)


def _ranges(faiss: ModuleType, index: Any) -> tuple[np.ndarray, np.ndarray]:
    """(lowest, highest) value in each dimension, float32."""
    lowest, highest = np.full(index.d, np.inf, np.float32), np.full(index.d, -np.inf, np.float32)
    for _, _, vectors in _lists(faiss, index):
        lowest, highest = np.minimum(lowest, vectors.min(axis=0)), np.maximum(highest, vectors.max(axis=0))
    return lowest, highest


def _longest(vectors: np.ndarray) -> float:
    return float(np.linalg.norm(vectors, axis=1).max())
