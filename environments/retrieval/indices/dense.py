"""Dense retrieval: an encoder for queries and an index of the passages' vectors, built in memory or
read from disk."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from rlflow.components import takes
from rlflow.errors import ConfigError, DataError
from rlflow.values import NonNegativeInt, PositiveInt
from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.retrieval.encoders import Encoder, NgramEncoder
from rlflow_environments.retrieval.indices.base import CorpusRetriever, Ranking, Retriever
from rlflow_environments.retrieval.indices.faiss_index import FaissIndex, new_index, read_index
from rlflow_environments.retrieval.indices.opening import (
    EncoderOption,
    check_count,
    encoder_of,
    open_index,
    verify_encoder,
)
from rlflow_environments.retrieval.indices.recall import describe_recall
from rlflow_environments.retrieval.indices.stored_vectors import (
    can_be_read,
    keeps_exactly,
    stored_vector,
)

logger = logging.getLogger("rlflow.search.index")  # under `rlflow`, so that a run's log has it

BLOCK = 2048  # passages encoded at a time: what a killed build loses at most
TRAINING_ROWS_PER_LIST = 64  # faiss asks for 39 at least
_UNIT = 1.01  # length of a "unit" vector that went through float16


class VectorIndex(Protocol):
    """Ranks rows by their vectors' inner products with a query's. Thread-safe. scanned: vectors
    that a query is compared with, about."""

    count: int
    dimensions: int
    scanned: int

    def rank_vectors(self, vectors: np.ndarray, top_k: int) -> list[Ranking]:
        """For each of (B, D) float32 vectors, at most `top_k` rows, best first, ties by row."""


class DenseIndex:
    """Ranks by vectors. A query without anything to encode is a zero vector: nothing is close to
    it."""

    def __init__(self, encoder: Encoder, vectors: VectorIndex) -> None:
        """Raises DataError where the encoder makes vectors of another length than the index
        holds."""
        if encoder.dimensions != vectors.dimensions:
            raise DataError(
                f"retriever: the encoder makes {encoder.dimensions} dimensions, the index holds "
                f"{vectors.dimensions}. Give the encoder that the index was built with."
            )
        self.encoder = encoder
        self.vectors = vectors

    def rank(self, queries: Sequence[str], top_k: int) -> list[Ranking]:
        """See Index."""
        encoded = self.encoder.encode_queries(queries)
        rankings: list[Ranking] = [[] for _ in queries]
        places = np.flatnonzero(encoded.any(axis=1))
        if len(places):
            found = self.vectors.rank_vectors(encoded[places], top_k)
            for place, ranking in zip(places, found, strict=True):
                rankings[place] = ranking
        return rankings


@takes(NgramEncoder)
def faiss_retriever(
    corpus: Sequence[Passage],
    *,
    path: str | None = None,
    index: str | None = None,
    encoder: EncoderOption = None,
    nprobe: PositiveInt | None = None,
    ef_search: PositiveInt | None = None,
    refine: NonNegativeInt = 0,
    mmap: bool = True,
    gpu: bool = False,
    verify: bool = True,
    **hashed: Any,
) -> Retriever:
    """Retrieval with faiss. path: an index folder, or a faiss file as Search-R1 builds it; without
    one the index is built in memory as `index` says (an index_factory string, Flat by default). See
    FaissIndex for nprobe, ef_search (an index folder knows what its build measured to be enough),
    refine, gpu. mmap: leave a file's vectors on disk. verify: encode a few passages again and
    compare, where single vectors can be read.
    """
    options = {"nprobe": nprobe, "ef_search": ef_search, "refine": refine, "gpu": gpu}
    if path is None:
        made = encoder_of(encoder, hashed, corpus)
        built, kept = build_faiss(index or "Flat", made, corpus, keep=refine > 0)
        vectors = FaissIndex(built, vectors=kept, **options, largest_norm=_norm(made))
        _log_recall(f"retriever faiss, {index}", vectors, None)
        return CorpusRetriever(corpus, DenseIndex(made, vectors))
    if index is not None:
        raise ConfigError(
            "retriever.index: decided when the index was built; remove it, or remove "
            "retriever.path."
        )
    opened = open_index(Path(path), encoder, hashed, corpus)
    meta, kept = opened.meta, opened.embeddings
    if meta is not None and meta.kind == "torch":
        raise ConfigError(
            f"{path}: an index of kind torch. Set retriever.name to torch, or build with --index "
            "Flat."
        )
    loaded = read_index(opened.index, mmap=mmap)
    check_count(opened.index, loaded.ntotal, corpus)
    measured = None if meta is None else meta.search
    if nprobe is None and ef_search is None and measured is not None:
        knobs = ("nprobe", "ef_search")
        options.update({name: measured[name] for name in knobs if name in measured})
    vectors = FaissIndex(loaded, vectors=kept, **options, largest_norm=_norm(opened.encoder))
    _log_recall(path, vectors, measured)
    if verify and meta is not None and kept is not None:
        verify_encoder(str(path), opened.encoder, corpus, lambda row, _: kept[row])
    elif verify and can_be_read(loaded):
        stored = partial(stored_vector, loaded)
        exact = keeps_exactly(loaded)
        verify_encoder(str(path), opened.encoder, corpus, stored, exact=exact)
    return CorpusRetriever(corpus, DenseIndex(opened.encoder, vectors))


@takes(NgramEncoder)
def torch_retriever(
    corpus: Sequence[Passage],
    *,
    path: str | None = None,
    encoder: EncoderOption = None,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    device: str = "cpu",
    verify: bool = True,
    **hashed: Any,
) -> Retriever:
    """Exact retrieval with torch alone. path: an index folder with embeddings or a flat faiss file;
    without one the vectors are made in memory. dtype, device: of the scan, see TorchIndex; the
    results are those of the stored vectors in any case."""
    from rlflow_environments.retrieval.indices.torch_index import TorchIndex

    if path is None:
        made = encoder_of(encoder, hashed, corpus)
        vectors = np.concatenate(list(_encoded_blocks(made, corpus)))
        index = TorchIndex(vectors, dtype=dtype, device=device)
        return CorpusRetriever(corpus, DenseIndex(made, index))
    opened = open_index(Path(path), encoder, hashed, corpus)
    kept = opened.embeddings
    if kept is None:
        raise DataError(
            f"{path}: holds no embeddings for the retriever torch. Build with --index torch, or "
            "with --keep-embeddings."
        )
    check_count(Path(path), len(kept), corpus)
    index = TorchIndex(kept, dtype=dtype, device=device)
    if verify:
        verify_encoder(str(path), opened.encoder, corpus, lambda row, _: kept[row])
    return CorpusRetriever(corpus, DenseIndex(opened.encoder, index))


def build_faiss(
    factory: str, encoder: Encoder, corpus: Sequence[Passage], *, keep: bool
) -> tuple[Any, np.ndarray | None]:
    """(trained and filled index, the vectors if `keep`)."""
    index = new_index(factory, encoder.dimensions)
    if not index.is_trained:
        rows = training_rows(index, len(corpus))
        index.train(encoder.encode_passages([corpus[row] for row in rows]))
    kept = []
    for block in _encoded_blocks(encoder, corpus):
        index.add(block)
        if keep:
            kept.append(block)
    return index, np.concatenate(kept) if keep else None


def training_rows(index: Any, count: int) -> list[int]:
    """Evenly spread rows to train an index on: enough for its lists. Raises ConfigError for more
    lists than rows."""
    lists = int(getattr(index, "nlist", 0)) or 256
    if lists > count:
        raise ConfigError(
            f"index: {lists} lists for {count} passages; expected at most a list per passage. Use "
            "fewer, or Flat."
        )
    wanted = min(count, max(65_536, lists * TRAINING_ROWS_PER_LIST))
    return [row * count // wanted for row in range(wanted)]


def _encoded_blocks(encoder: Encoder, corpus: Sequence[Passage]) -> Iterator[np.ndarray]:
    for first in range(0, len(corpus), BLOCK):
        yield encoder.encode_passages(corpus[first : first + BLOCK])


def _log_recall(where: str, vectors: FaissIndex, measured: Mapping[str, Any] | None) -> None:
    if vectors.searched:
        line, low = describe_recall(measured, vectors.searched)
        logger.log(logging.WARNING if low else logging.INFO, "%s: %s.", where, line)


def _norm(encoder: Encoder) -> float | None:
    """The bound on the vectors' lengths that exactness rests on; None where it has to be
    measured."""
    return _UNIT if getattr(encoder, "unit_vectors", False) else None
