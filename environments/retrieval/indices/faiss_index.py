"""Search with faiss: exact for flat indices, approximate for every other index_factory string;
memory-mapped files; GPUs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil

from rlflow.errors import ConfigError, DataError, install_command, needing
from rlflow_environments.retrieval.indices.base import Ranking
from rlflow_environments.retrieval.indices.exact import OVERFETCH, rank_exactly, score_again

_SEQUENTIAL_BATCH = 16  # faiss sums each query alone below distance_compute_blas_threshold (20)
_GPU_BATCH = 64  # every call has this shape, so that a query always meets the same kernels
_GPU_OVERFETCH = 120
_BLOCK = 65_536
_FLOAT32 = 2.0**-24
_FLOAT16 = 2.0**-10  # both factors rounded
_UNMEASURED_NPROBE = 16  # at least, and one list in 64: what the field searches of IVF4096
_UNMEASURED_EF = 64
_LINKS = 32  # of a node of HNSW that is looked at, about


class FaissIndex:
    """Inner products over a faiss index whose ids are corpus rows.

    A flat index is exact (see `exact`). The others search what they were built to search, a few
    queries at a time or one by one, so that a result does not depend on its batch.
    """

    def __init__(
        self,
        index: Any,
        *,
        vectors: np.ndarray | None = None,
        nprobe: int | None = None,
        ef_search: int | None = None,
        refine: int = 0,
        gpu: bool = False,
        largest_norm: float | None = None,
    ) -> None:
        """index: of faiss. vectors: (N, D), what scores are computed from again; needed for
        `refine`. nprobe: lists searched by IVF; ef_search: of HNSW (None: what the index says, else
        a guess, not faiss' 1 list and 16 neighbours). refine: candidates per result that are scored
        again exactly (0: none). gpu: a copy on every visible GPU's share, in float16. largest_norm:
        bound on the vectors' lengths, for a flat index (None: measured).

        Raises ConfigError for parameters that this kind of index does not have, DataError for a
        metric other than inner product."""
        faiss = import_faiss()
        if index.metric_type != faiss.METRIC_INNER_PRODUCT:
            raise DataError(
                "faiss index: expected the metric inner product, found another. Build it with "
                "METRIC_INNER_PRODUCT."
            )
        if refine and vectors is None:
            raise ConfigError(
                "retriever faiss.refine: needs the embeddings beside the index. Build with "
                "--keep-embeddings."
            )
        self._index = index
        self._vectors = vectors
        self._refine = refine
        self.count, self.dimensions = int(index.ntotal), int(index.d)
        self._flat = isinstance(index, faiss.IndexFlat)
        if self._flat and largest_norm is None:
            largest_norm = max(
                float(np.linalg.norm(part, axis=1).max()) for _, part in self._blocks()
            )
        self._largest_norm = largest_norm
        self.searched = _set_parameters(faiss, index, nprobe, ef_search)
        """How far it searches: {"nprobe": ...} of IVF, {"ef_search": ...} of HNSW, else nothing."""
        self.overfetch = _GPU_OVERFETCH if gpu else OVERFETCH
        self._gpu = _to_gpus(faiss, index) if gpu else None
        self._lock = threading.Lock()  # GPU indices are not thread-safe
        query_by_query = (
            faiss.IndexIVFFlat,
            faiss.IndexIVFScalarQuantizer,
            faiss.IndexHNSW,
            faiss.IndexScalarQuantizer,
        )
        self._batch = _SEQUENTIAL_BATCH if isinstance(index, query_by_query) else 1

    @property
    def scanned(self) -> int:
        """See VectorIndex."""
        if "nprobe" in self.searched:
            lists = knob_of(import_faiss(), self._index).most  # type: ignore[union-attr]
            return lists + self.count * self.searched["nprobe"] // lists
        return min(self.count, self.searched.get("ef_search", self.count) * _LINKS)

    def rank_vectors(self, vectors: np.ndarray, top_k: int) -> list[Ranking]:
        """See VectorIndex."""
        if self._flat:
            return rank_exactly(self, vectors, top_k)
        depth = min(max(top_k + OVERFETCH, top_k * self._refine), self.count)
        found = zip(vectors, *self.propose(vectors, depth), strict=True)
        return [self._ranking(vector, scores, rows, top_k) for vector, scores, rows in found]

    def propose(self, vectors: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
        """See Scan; row -1 where an approximate index finds fewer."""
        if self._flat and self._gpu is None:
            return self._index.search(vectors, depth)
        search, size = self._index.search, self._batch
        if self._gpu is not None:
            search, size = self._search_gpus, _GPU_BATCH
        blocks = (vectors[start : start + size] for start in range(0, len(vectors), size))
        scores, rows = zip(*(search(block, depth) for block in blocks), strict=True)
        return np.concatenate(scores), np.concatenate(rows)

    def at_least(self, vector: np.ndarray, score: float) -> np.ndarray:
        """See Scan."""
        threshold = score - self.error_bound(vector[None])[0]
        if self._gpu is not None:  # without range search; near ties are rare enough for the CPU
            found = (
                start + np.flatnonzero(part.astype(np.float32) @ vector >= threshold)
                for start, part in self._blocks()
            )
            return np.concatenate(list(found))
        radius = np.nextafter(
            np.float32(threshold), np.float32(-np.inf)
        )  # faiss keeps what lies above
        _, _, rows = self._index.range_search(vector[None], float(radius))
        return np.sort(rows)

    def stored(self, rows: np.ndarray) -> np.ndarray:
        """See Scan."""
        return self._index.reconstruct_batch(rows) if self._vectors is None else self._vectors[rows]

    def error_bound(self, vectors: np.ndarray) -> np.ndarray:
        """d u |q||x|, the bound of a sum of d products in any order, and float16 factors on a
        GPU."""
        relative = self.dimensions * _FLOAT32 + (0.0 if self._gpu is None else _FLOAT16)
        return np.linalg.norm(vectors, axis=1) * 1.01 * relative * self._largest_norm

    def _blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """(first row, vectors) of block after block."""
        for start in range(0, self.count, _BLOCK):
            yield start, self.stored(np.arange(start, min(start + _BLOCK, self.count)))

    def _search_gpus(self, vectors: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
        padded = np.zeros((_GPU_BATCH, self.dimensions), np.float32)
        padded[: len(vectors)] = vectors
        with self._lock:
            scores, rows = self._gpu.search(padded, depth)
        return scores[: len(vectors)], rows[: len(vectors)]

    def _ranking(
        self, vector: np.ndarray, scores: np.ndarray, rows: np.ndarray, top_k: int
    ) -> Ranking:
        """What the index found for a query: as it scored them, or scored again."""
        scores, rows = scores[rows >= 0], rows[rows >= 0]
        if self._refine:
            return score_again(self, vector, np.sort(rows), top_k)
        order = np.lexsort((rows, -scores))[:top_k]
        return list(zip(rows[order].tolist(), scores[order].tolist(), strict=True))


def import_faiss() -> ModuleType:
    """The module faiss. Raises MissingPackageError."""
    with needing("retriever faiss", install_command("search")):
        import faiss
    return faiss


def new_index(factory: str, dimensions: int) -> Any:
    """An empty index of a factory string, metric inner product. Raises ConfigError for a string
    that faiss refuses."""
    faiss = import_faiss()
    try:
        return faiss.index_factory(dimensions, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as problem:
        reason = str(problem).rpartition(": ")[2].partition("\n")[0][:200]
        raise ConfigError(
            f"index: '{factory}' is not an index_factory string that faiss takes for {dimensions} "
            f"dimensions ({reason}). Examples: Flat, SQ8, SQfp16, HNSW32, IVF1024,Flat, "
            "IVF4096,SQ8."
        ) from None


def bytes_per_vector(factory: str, dimensions: int) -> float:
    """What an index of a factory string keeps of a vector, ids and links included."""
    faiss, index = import_faiss(), new_index(factory, dimensions)
    ivf = faiss.try_extract_index_ivf(index)
    if ivf is not None:
        return ivf.code_size + 8  # an id of 64 bits
    if isinstance(index, faiss.IndexHNSW):
        # At the higher levels, an eighth of the links of the lowest (Malkov and Yashunin 2018).
        return faiss.downcast_index(index.storage).sa_code_size() + 4.5 * index.hnsw.nb_neighbors(0)
    try:
        return index.sa_code_size()
    except RuntimeError:  # of kinds that faiss gives no size for
        return 4.0 * dimensions


def read_index(path: Path, *, mmap: bool) -> Any:
    """The index of a file; with `mmap` its vectors stay on disk and are shared by all processes.
    Raises DataError."""
    faiss = import_faiss()
    try:
        with path.open("rb") as file:
            kind = file.read(2)
        # Inverted lists and flat codes have a flag each.
        flags = (faiss.IO_FLAG_MMAP if kind == b"Iw" else faiss.IO_FLAG_MMAP_IFC) if mmap else 0
        index = faiss.read_index(str(path), flags)
        if path.stat().st_size < psutil.virtual_memory().available:
            _leave_out_prefetch(faiss, index)
        return index
    except OSError as problem:
        raise DataError(
            f"{path}: expected a faiss index, found none ({problem.strerror})."
        ) from None
    except RuntimeError as problem:
        reason = str(problem).rpartition(": ")[2].partition("\n")[0][:200]
        raise DataError(
            f"{path}: expected a faiss index, found something else ({reason}). Build it again."
        ) from None


def _leave_out_prefetch(faiss: ModuleType, index: Any) -> None:
    """For mapped lists faiss starts 32 threads per search, which read ahead what it will scan: a
    help for a file that memory does not hold, more than half of the time of a search for one that
    it holds."""
    ivf = faiss.try_extract_index_ivf(index)
    lists = faiss.downcast_InvertedLists(ivf.invlists) if ivf is not None else None
    if isinstance(lists, faiss.OnDiskInvertedLists):
        lists.prefetch_nthread = 0


@dataclass(frozen=True)
class SearchKnob:
    """What decides how far an approximate index searches. owner.attribute: where it stands; most:
    its largest value."""

    name: str
    owner: Any
    attribute: str
    most: int

    @property
    def value(self) -> int:
        """As it is set."""
        return int(getattr(self.owner, self.attribute))

    def set(self, value: int) -> None:
        """Searches that far from now on, or as far as there is anything."""
        setattr(self.owner, self.attribute, min(value, self.most))


def knob_of(faiss: ModuleType, index: Any) -> SearchKnob | None:
    """`nprobe` of an IVF index, behind a transform too, `ef_search` of HNSW; None of the others."""
    ivf = faiss.try_extract_index_ivf(index)
    if ivf is not None:
        return SearchKnob("nprobe", ivf, "nprobe", int(ivf.nlist))
    if isinstance(index, faiss.IndexHNSW):
        return SearchKnob("ef_search", index.hnsw, "efSearch", max(1, int(index.ntotal)))
    return None


def _set_parameters(
    faiss: ModuleType, index: Any, nprobe: int | None, ef_search: int | None
) -> dict[str, int]:
    """Sets how far the index searches, and returns it."""
    knob = knob_of(faiss, index)
    for name, value, kind in (("nprobe", nprobe, "IVF"), ("ef_search", ef_search, "HNSW")):
        if value is None:
            continue
        if knob is None or knob.name != name:
            raise ConfigError(
                f"retriever faiss.{name}: only an {kind} index has it; this one is "
                f"{type(index).__name__}. Remove it."
            )
    if knob is None:
        return {}
    if knob.name == "nprobe":
        guess = knob.value if knob.value > 1 else max(_UNMEASURED_NPROBE, knob.most // 64)
    else:
        guess = max(_UNMEASURED_EF, knob.value)
    knob.set(nprobe or ef_search or guess)
    return {knob.name: knob.value}


def _to_gpus(faiss: ModuleType, index: Any) -> Any:
    if not hasattr(faiss, "GpuMultipleClonerOptions"):
        raise ConfigError(
            "retriever faiss.gpu: this faiss has no GPU support. Replace it: pip uninstall "
            f"faiss-cpu, then {install_command('search-gpu')}"
        )
    if not faiss.get_num_gpus():
        raise ConfigError("retriever faiss.gpu: faiss sees no GPU here. Remove the option.")
    options = faiss.GpuMultipleClonerOptions()
    options.useFloat16 = True
    options.shard = True
    return faiss.index_cpu_to_all_gpus(index, co=options)
