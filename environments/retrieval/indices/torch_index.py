"""Flat search with torch alone: tiles of a matrix product, whose best are kept, on CPU and CUDA."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from rlflow.matmul import linear
from rlflow_environments.retrieval.devices import DTYPES, check_device
from rlflow_environments.retrieval.indices.base import Ranking
from rlflow_environments.retrieval.indices.exact import OVERFETCH, rank_exactly

_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-11}
_OVERFETCH_ROUNDED = 120  # further proposals where the scan rounds to 16 bits
_TILE_SCORES = {"cpu": 2**20, "cuda": 2**27}  # at a time: those of a tile stay in the CPU's cache
_MIN_TILE_ROWS = 4096
_LOADED_ROWS = 65_536  # rows converted at a time


class TorchIndex:
    """Exact inner products. The scan holds a copy of the vectors in `dtype` on `device`; with 16
    bits it reads half the bytes. Results are those of `vectors`, exactly (see `exact`): read from
    memory or from a file mapped into it. The B x N scores are never stored: those of a tile become
    candidates at once.
    """

    def __init__(self, vectors: np.ndarray, *, dtype: str = "float32", device: str = "cpu") -> None:
        """vectors: (N, D) float32 or float16, kept by reference. dtype: a key of DTYPES. Raises
        ConfigError: unknown device."""
        self._vectors = vectors
        self._dtype = DTYPES[dtype]
        self._device = check_device(device)
        self.count, self.dimensions = vectors.shape
        self.scanned = self.count
        self.overfetch = OVERFETCH if dtype == "float32" else _OVERFETCH_ROUNDED
        self._matrix = torch.empty(vectors.shape, dtype=self._dtype, device=self._device)
        self._largest_norm = 0.0
        self._largest_rounding = 0.0
        for start in range(0, self.count, _LOADED_ROWS):
            self._load(start, vectors[start : start + _LOADED_ROWS])

    def rank_vectors(self, vectors: np.ndarray, top_k: int) -> list[Ranking]:
        """See VectorIndex."""
        return rank_exactly(self, vectors, top_k)

    def propose(self, vectors: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
        """See Scan."""
        found = [
            (scores.topk(min(depth, scores.shape[1]), dim=1), start)
            for start, scores in self._scan(vectors)
        ]
        scores = torch.cat([top.values for top, _ in found], dim=1)
        rows = torch.cat([top.indices + start for top, start in found], dim=1)
        scores, order = scores.topk(depth, dim=1)
        return scores.float().cpu().numpy(), rows.gather(1, order).cpu().numpy()

    def at_least(self, vector: np.ndarray, score: float) -> np.ndarray:
        """See Scan."""
        # torch compares in float32, to which the threshold must not be rounded upwards.
        threshold = np.float32(score - self.error_bound(vector[None])[0])
        least = float(np.nextafter(threshold, np.float32(-np.inf)))
        found = [
            (scores[0].float() >= least).nonzero().flatten() + start
            for start, scores in self._scan(vector[None])
        ]
        return torch.cat(found).cpu().numpy()

    def stored(self, rows: np.ndarray) -> np.ndarray:
        """See Scan."""
        return self._vectors[rows]

    def error_bound(self, vectors: np.ndarray) -> np.ndarray:
        """|q.x - scan| <= |q||x - x'| + |q - q'||x'| + rounding of the sum and of what is stored
        (Cauchy-Schwarz), x' and q' being what the scan holds."""
        rounded = torch.from_numpy(vectors).to(self._dtype).double().numpy()
        lengths = np.linalg.norm(vectors.astype(np.float64), axis=1)
        query_rounding = np.linalg.norm(vectors - rounded, axis=1)
        inputs = lengths * self._largest_rounding + query_rounding * self._largest_norm
        relative = self.dimensions * _ROUNDOFF[torch.float32]
        if self._dtype != torch.float32:
            relative += _ROUNDOFF[self._dtype]
        if self._device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
            relative += 2.0**-9  # both factors to 11 bits
        return inputs + 1.01 * lengths * self._largest_norm * relative

    def _load(self, start: int, block: np.ndarray) -> None:
        wide = torch.from_numpy(np.array(block)).float()  # a mapped file may be unaligned
        held = wide.to(self._dtype)
        self._matrix[start : start + len(block)] = held.to(self._device)
        norm, rounding = held.float().norm(dim=1).max(), (wide - held.float()).norm(dim=1).max()
        self._largest_norm = max(self._largest_norm, float(norm))
        self._largest_rounding = max(self._largest_rounding, float(rounding) * 1.01)

    @torch.no_grad()
    def _scan(self, vectors: np.ndarray) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, (B, rows) scores) of tile after tile."""
        rows = max(_MIN_TILE_ROWS, _TILE_SCORES[self._device.type] // len(vectors))
        # numpy's BLAS reads a matrix at the speed of memory; torch's (MKL) at half of it on AMD.
        by_numpy = len(vectors) == 1 and self._matrix.dtype == torch.float32
        by_numpy = by_numpy and self._device.type == "cpu"
        queries = torch.from_numpy(np.ascontiguousarray(vectors))
        queries = queries.to(self._device, self._dtype)
        for start in range(0, self.count, rows):
            tile = self._matrix[start : start + rows]
            if by_numpy:
                yield start, torch.from_numpy(tile.numpy() @ vectors[0])[None]
            else:
                yield start, linear(tile, queries).T
