"""Flat search with torch alone: tiles of a matrix product with a running top-k, on CPU and CUDA."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from rlflow.errors import ConfigError, did_you_mean
from rlflow.matmul import linear
from rlflow_environments.retrieval.devices import DTYPES, check_device
from rlflow_environments.retrieval.indices.base import Ranking
from rlflow_environments.retrieval.indices.exact import OVERFETCH, rank_exactly

_MANTISSA = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-11}  # unit roundoff
_OVERFETCH_ROUNDED = 120  # further proposals where the scan rounds to 16 bits
_TILE_SCORES = {"cpu": 2**20, "cuda": 2**27}  # scores held at a time: those of a tile stay in the CPU's cache
_MIN_TILE_ROWS = 4096
_LOADED_ROWS = 65_536  # rows converted at a time


class TorchIndex:
    """Exact inner products. The scan holds a copy of the vectors in `dtype` on `device`; results are those of `vectors`.

    The B x N scores are never stored: a tile's scores become candidates at once. With a 16-bit `dtype` the scan reads half the
    bytes, and the results stay those of `vectors`, exactly (see `exact`): read from memory or from a file mapped into it.
    """

    def __init__(self, vectors: np.ndarray, *, dtype: str = "float32", device: str = "cpu") -> None:
        """vectors: (N, dimensions) float32 or float16, kept by reference. Raises ConfigError: unknown dtype or device."""
        self._vectors = vectors
        self._dtype = check_dtype(dtype)
        self._device = check_device(device)
        self.count, self.dimensions = vectors.shape
        self.scanned = self.count
        self.overfetch = OVERFETCH if self._dtype == torch.float32 else _OVERFETCH_ROUNDED
        self._matrix = _empty(vectors.shape, self._dtype, self._device)
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
        least = float(np.nextafter(np.float32(score - self.error_bound(vector[None])[0]), np.float32(-np.inf)))
        found = [(scores[0].float() >= least).nonzero().flatten() + start for start, scores in self._scan(vector[None])]
        return torch.cat(found).cpu().numpy()

    def stored(self, rows: np.ndarray) -> np.ndarray:
        """See Scan."""
        return self._vectors[rows]

    def error_bound(self, vectors: np.ndarray) -> np.ndarray:
        """|q.x - scan| <= |q||x - x'| + |q - q'||x'| + rounding of the sum and of what is stored (Cauchy-Schwarz), x' being
        the copy."""
        rounded = torch.from_numpy(vectors).to(self._dtype).double().numpy()
        lengths = np.linalg.norm(vectors.astype(np.float64), axis=1)
        inputs = lengths * self._largest_rounding + np.linalg.norm(vectors - rounded, axis=1) * self._largest_norm
        result = _MANTISSA[self._dtype] if self._dtype != torch.float32 else 0.0
        if self._device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
            result += 2.0**-9  # both factors to 11 bits
        return inputs + 1.01 * lengths * self._largest_norm * (self.dimensions * _MANTISSA[torch.float32] + result)

    def _load(self, start: int, block: np.ndarray) -> None:
        wide = torch.from_numpy(np.array(block)).float()  # a mapped file is read-only, and may be unaligned
        held = wide.to(self._dtype)
        self._matrix[start : start + len(block)] = held.to(self._device)
        self._largest_norm = max(self._largest_norm, float(held.float().norm(dim=1).max()))
        self._largest_rounding = max(self._largest_rounding, float((wide - held.float()).norm(dim=1).max()) * 1.01)

    def _scan(self, vectors: np.ndarray) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, (B, rows) scores) of tile after tile."""
        rows = max(_MIN_TILE_ROWS, _TILE_SCORES[self._device.type] // len(vectors))
        alone = len(vectors) == 1 and self._device.type == "cpu" and self._dtype == torch.float32
        queries = torch.from_numpy(np.ascontiguousarray(vectors)).to(self._device, self._dtype)
        for start in range(0, self.count, rows):
            tile = self._matrix[start : start + rows]
            if alone:  # numpy's BLAS reads a matrix at the speed of memory; torch's (MKL) at half of it on AMD
                yield start, torch.from_numpy(tile.numpy() @ vectors[0])[None]
            else:
                with torch.no_grad():  # for the faster product
                    scores = linear(tile, queries)
                yield start, scores.T


def check_dtype(name: str) -> torch.dtype:
    """The torch type of a name. Raises ConfigError."""
    if name not in DTYPES:
        raise ConfigError(
            f"retriever torch.dtype: expected one of {', '.join(DTYPES)}, found '{name}'.{did_you_mean(str(name), DTYPES)}"
        )
    return DTYPES[name]


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialized memory; on a CPU from numpy, which asks for huge pages: a scan of ordinary ones waits for the page tables."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    if dtype == torch.float32:
        return torch.from_numpy(np.empty(shape, np.float32))
    return torch.from_numpy(np.empty(shape, np.int16)).view(dtype)
