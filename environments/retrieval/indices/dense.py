"""Dense retrieval: an encoder for queries, and a faiss index of the passages' vectors, built in
memory or read from disk."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlflow.components import takes
from rlflow.errors import ConfigError, DataError
from rlflow.values import PositiveInt
from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.retrieval.encoders import Encoder, NgramEncoder
from rlflow_environments.retrieval.indices.base import (
    SHORT,
    CorpusRetriever,
    Ranking,
    Retriever,
    RetrieverFacts,
    best,
    with_facts,
)
from rlflow_environments.retrieval.indices.faiss_index import (
    UNMEASURED,
    describe_recall,
    import_faiss,
    knob_of,
    new_index,
    read_index,
    set_parameters,
    stored_vectors,
    to_gpus,
)
from rlflow_environments.retrieval.indices.folder import (
    INDEX,
    EncoderOption,
    check_encoder_given,
    compared_rows,
    encoder_of,
    open_folder,
    retriever_of,
    stored_encoder,
    verify_encoder,
)

logger = logging.getLogger(__name__)

BLOCK = 2048  # passages encoded at a time: what a killed build loses at most
OVERFETCH = 8  # proposals beyond top_k: a cut within rounding is rare, and costs a second scan
_SEQUENTIAL_BATCH = 16  # faiss sums each query alone below distance_compute_blas_threshold (20)
_SCORED_AT_A_TIME = 4096  # rows
_FLOAT32, _FLOAT16 = 2.0**-24, 2.0**-10  # relative rounding of a sum's terms; of both factors
_GPU_DEPTH = 2048  # faiss' limit there
_LINKS = 32  # of a node of HNSW that is looked at, about
_TILE_SCORES, _TILE_ROWS = 2**20, 4096  # of a tile: its scores stay in the processor's cache
_TRAINING_ROWS_PER_LIST = 64  # faiss asks for 39 at least


class DenseIndex:
    """Ranks by the inner products of a query's vector with those of a faiss index, whose ids are
    rows of the corpus. A query without anything to encode finds nothing.

    A scan of a flat index sums in an order that depends on the batch, and rounds. So it only
    proposes rows, which are scored again in float64, in one order; where a row that was not
    proposed could belong to the result, more are proposed. What a query gets depends on the query
    and the vectors alone. Other kinds search a few queries at a time, or one by one, to the same
    end."""

    def __init__(
        self,
        encoder: Encoder,
        index: Any,
        *,
        nprobe: int | None = None,
        ef_search: int | None = None,
        gpu: bool = False,
    ) -> None:
        """nprobe: lists searched by IVF; ef_search: neighbours by HNSW (None: what the index says,
        else a guess). gpu: a copy on every visible GPU's share, in float16.

        Raises ConfigError for parameters that this kind of index does not have, DataError for
        another metric than inner product or other dimensions than the encoder's."""
        faiss = import_faiss()
        if index.metric_type != faiss.METRIC_INNER_PRODUCT:
            raise DataError(
                "faiss index: expected the metric inner product, found another. Build it with "
                "METRIC_INNER_PRODUCT."
            )
        self.count, self.dimensions = int(index.ntotal), int(index.d)
        if encoder.dimensions != self.dimensions:
            raise DataError(
                f"retriever: the encoder makes {encoder.dimensions} dimensions, the index holds "
                f"{self.dimensions}. Give the encoder that the index was built with."
            )
        self.encoder, self._index = encoder, index
        self.searched = set_parameters(index, nprobe, ef_search)
        """How far it searches: {"nprobe": ...} of IVF, {"ef_search": ...} of HNSW, else nothing."""
        self._flat = isinstance(index, faiss.IndexFlat)
        self._vectors = None  # in memory; those of a mapped file need not lie as torch reads them
        if self._flat and not gpu:
            found = faiss.rev_swig_ptr(index.get_xb(), index.ntotal * index.d)
            self._vectors = found.reshape(-1, index.d) if found.flags.aligned else None
        self._gpu = to_gpus(index) if gpu else None
        self._lock = threading.Lock()  # GPU indices are not thread-safe
        few = (
            faiss.IndexIVFFlat,
            faiss.IndexIVFScalarQuantizer,
            faiss.IndexHNSW,
            faiss.IndexScalarQuantizer,
        )
        self._batch = _SEQUENTIAL_BATCH if isinstance(index, few) else 1

    @property
    def scanned(self) -> int:
        """Vectors that a query is compared with, about."""
        if "nprobe" in self.searched:
            lists = knob_of(self._index).most  # type: ignore[union-attr]
            return lists + self.count * self.searched["nprobe"] // lists
        return min(self.count, self.searched.get("ef_search", self.count) * _LINKS)

    def rank(self, queries: Sequence[str], top_k: int) -> list[Ranking]:
        """See Index."""
        encoded = self.encoder.encode_queries(queries)
        rankings: list[Ranking] = [[] for _ in queries]
        places = np.flatnonzero(encoded.any(axis=1))
        found = self.rank_vectors(encoded[places], top_k) if len(places) else []
        for place, ranking in zip(places, found, strict=True):
            rankings[place] = ranking
        return rankings

    def rank_vectors(self, vectors: np.ndarray, top_k: int) -> list[Ranking]:
        """For each of (B, D) float32 vectors, at most `top_k` rows, best first, ties by row."""
        depth = min(top_k + OVERFETCH, self.count)
        found = zip(vectors, *self._search(vectors, depth), strict=True)
        if self._flat:
            return [self._exactly(vector, scores, rows, top_k) for vector, scores, rows in found]
        rankings = []
        for _, scores, rows in found:
            scores, rows = scores[rows >= 0], rows[rows >= 0]
            order = np.lexsort((rows, -scores))[:top_k]
            rankings.append(list(zip(rows[order].tolist(), scores[order].tolist(), strict=True)))
        return rankings

    def _search(self, vectors: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
        """(scores, rows), both (B, depth); row -1 where an index finds fewer."""
        if self._vectors is not None:
            return nearest(self._vectors, vectors, depth)
        if self._gpu is not None and depth < _GPU_DEPTH:
            with self._lock:
                return self._gpu.search(vectors, depth)
        if self._flat:
            return self._index.search(vectors, depth)
        blocks = range(0, len(vectors), self._batch)
        found = [self._index.search(vectors[at : at + self._batch], depth) for at in blocks]
        scores, rows = zip(*found, strict=True)
        return np.concatenate(scores), np.concatenate(rows)

    def _exactly(
        self, vector: np.ndarray, scores: np.ndarray, rows: np.ndarray, top_k: int
    ) -> Ranking:
        """The best rows by scores in float64, whatever the scan rounded."""
        rounding = self.dimensions * _FLOAT32 + (0.0 if self._gpu is None else _FLOAT16)
        while True:
            rows = np.sort(rows)
            exact, longest = np.empty(len(rows)), 0.0
            for start in range(0, len(rows), _SCORED_AT_A_TIME):
                part = slice(start, start + _SCORED_AT_A_TIME)
                stored = self._index.reconstruct_batch(rows[part])
                exact[part] = (stored.astype(np.float64) * vector).sum(axis=1)
                longest = max(longest, float(np.linalg.norm(stored, axis=1).max()))
            ranking = best(rows, exact, top_k)
            # The scan puts rows that were not proposed at most where the last proposal is.
            bound = 1.01 * rounding * longest * float(np.linalg.norm(vector))
            if len(rows) == self.count or scores.min() < ranking[-1][1] - bound:
                return ranking
            (scores,), (rows,) = self._search(vector[None], min(8 * len(rows), self.count))


@with_facts(RetrieverFacts(package="faiss"))
@takes(NgramEncoder)
def faiss_retriever(
    corpus: Sequence[Passage],
    *,
    path: str | None = None,
    index: str | None = None,
    encoder: EncoderOption = None,
    nprobe: PositiveInt | None = None,
    ef_search: PositiveInt | None = None,
    mmap: bool = True,
    gpu: bool = False,
    verify: bool = True,
    **hashed: Any,
) -> Retriever:
    """Retrieval with faiss. path: an index folder, or a faiss file as Search-R1 builds it; without
    one the index is built in memory as `index` says (an index_factory string, Flat by default). See
    DenseIndex for nprobe, ef_search (an index folder knows what its build measured to be enough)
    and gpu. mmap: leave a file's vectors on disk. verify: encode a few passages again and compare,
    where an index does not say how it was built."""
    options: dict[str, Any] = {"nprobe": nprobe, "ef_search": ef_search, "gpu": gpu}
    if path is None:
        made = encoder_of(encoder, hashed, corpus)
        dense = DenseIndex(made, build_faiss(index or "Flat", made, corpus), **options)
        _log_recall(f"retriever faiss, {index}", dense, None)
        return CorpusRetriever(corpus, dense)
    if index is not None:
        raise ConfigError(
            "retriever.index: decided when the index was built; remove it, or remove "
            "retriever.path."
        )
    place, measured = Path(path).expanduser(), None
    if place.is_file():
        check_encoder_given(place, encoder)
        opened = encoder_of(encoder, hashed, corpus)
    else:
        meta = open_folder(place, corpus)
        if (name := retriever_of(meta)) != "faiss":
            raise ConfigError(f"{place}: an index of kind {name}. Set retriever.name to {name}.")
        opened, measured = stored_encoder(place, meta, encoder, hashed), meta.search
        place = place / INDEX
    loaded = read_index(place, mmap=mmap)
    if loaded.ntotal != len(corpus):
        raise DataError(
            f"{place}: holds {loaded.ntotal} vectors, the corpus {len(corpus)} passages. Give the "
            "corpus that it was built on."
        )
    if nprobe is None and ef_search is None and measured is not None:
        options |= {name: measured[name] for name in UNMEASURED if name in measured}
    dense = DenseIndex(opened, loaded, **options)
    _log_recall(path, dense, measured)
    if verify:
        rows = compared_rows(corpus)
        if (found := stored_vectors(loaded, rows)) is not None:
            verify_encoder(path, opened, [corpus[row] for row in rows], *found)
    return CorpusRetriever(corpus, dense)


def build_faiss(factory: str, encoder: Encoder, corpus: Sequence[Passage]) -> Any:
    """A trained and filled index."""
    index = new_index(factory, encoder.dimensions)
    if not index.is_trained:
        rows = training_rows(index, len(corpus))
        index.train(encoder.encode_passages([corpus[row] for row in rows]))
    for first in range(0, len(corpus), BLOCK):
        index.add(encoder.encode_passages(corpus[first : first + BLOCK]))
    return index


def training_rows(index: Any, count: int) -> list[int]:
    """Evenly spread rows to train an index on: enough for its lists. Raises ConfigError for more
    lists than rows."""
    lists = int(getattr(index, "nlist", 0)) or 256
    if lists > count:
        raise ConfigError(
            f"index: {lists} lists for {count} passages; expected at most a list per passage. Use "
            "fewer, or Flat."
        )
    wanted = min(count, max(65_536, lists * _TRAINING_ROWS_PER_LIST))
    return [row * count // wanted for row in range(wanted)]


def _log_recall(where: str, dense: DenseIndex, measured: Mapping[str, Any] | None) -> None:
    if dense.searched:
        line, low = describe_recall(measured, dense.searched)
        logger.log(logging.WARNING if low else logging.INFO, "%s: %s.", where, line)


def nearest(vectors: np.ndarray, queries: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """(scores, rows), both (B, depth): the largest inner products of (N, D) with each of (B, D),
    largest first. depth: at most N."""
    import torch

    from rlflow.devices.matmul import linear

    asked = torch.from_numpy(np.ascontiguousarray(queries))
    rows = max(_TILE_ROWS, _TILE_SCORES // len(queries))
    values, places = [], []
    for start in range(0, len(vectors), rows):
        tile = vectors[start : start + rows]
        if len(queries) > 1:
            scores = linear(torch.from_numpy(tile), asked).T
        elif vectors.size > SHORT:
            # numpy's BLAS reads at the speed of memory, torch's at half of it on AMD; but its
            # threads wait busily for 10 ms after each product.
            scores = torch.from_numpy(tile @ queries[0])[None]
        else:
            scores = torch.mv(torch.from_numpy(tile), asked[0])[None]
        top = scores.topk(min(depth, len(tile)), dim=1)
        values.append(top.values)
        places.append(top.indices + start)
    scores, order = torch.cat(values, dim=1).topk(depth, dim=1)
    return scores.numpy(), torch.cat(places, dim=1).gather(1, order).numpy()
