"""Dense retrieval: an encoder for queries and an index of the passages' vectors, built in memory or read from disk."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rlflow.components import takes
from rlflow.errors import ConfigError, DataError
from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.retrieval.encoders import Encoder, NgramEncoder
from rlflow_environments.retrieval.indices.base import CorpusRetriever, Ranking, Retriever
from rlflow_environments.retrieval.indices.faiss_index import FaissIndex, new_index, read_index
from rlflow_environments.retrieval.indices.opening import check_count, encoder_of, open_index, verify_encoder
from rlflow_environments.retrieval.indices.recall import describe_recall
from rlflow_environments.retrieval.indices.stored_vectors import can_be_read, keeps_exactly, stored_vector

logger = logging.getLogger("rlflow.search.index")  # under `rlflow`, so that a run's log has it

BLOCK = 2048  # passages encoded at a time: never two copies of all vectors; what a killed build loses at most
TRAINING_ROWS_PER_LIST = 64  # faiss asks for 39 at least
_UNIT = 1.01  # length of a "unit" vector that went through float16


class VectorIndex(Protocol):
    """Ranks rows by their vectors' inner products with a query's. Thread-safe. scanned: vectors that a query is compared with,
    about."""

    count: int
    dimensions: int
    scanned: int

    def rank_vectors(self, vectors: np.ndarray, top_k: int) -> list[Ranking]:
        """For each of (B, dimensions) float32 vectors, at most `top_k` rows, best first, ties by row."""


class DenseIndex:
    """Ranks by vectors. A query without anything to encode is a zero vector: nothing is close to it."""

    def __init__(self, encoder: Encoder, vectors: VectorIndex) -> None:
        """Raises DataError where the encoder makes vectors of another length than the index holds."""
        if encoder.dimensions != vectors.dimensions:
            raise DataError(
                f"retriever: the encoder makes {encoder.dimensions} dimensions, the index holds {vectors.dimensions}. Give the "
                "encoder that the index was built with."
            )
        self.encoder = encoder
        self.vectors = vectors

    def rank(self, queries: Sequence[str], top_k: int) -> list[Ranking]:
        """See Index."""
        encoded = self.encoder.encode_queries(queries)
        rankings: list[Ranking] = [[] for _ in queries]
        places = np.flatnonzero(encoded.any(axis=1))
        if len(places):
            for place, ranking in zip(places, self.vectors.rank_vectors(encoded[places], top_k), strict=True):
                rankings[place] = ranking
        return rankings


@takes(NgramEncoder)
def faiss_retriever(
    corpus: Sequence[Passage],
    *,
    path: str | None = None,
    index: str | None = None,
    encoder: str | Mapping[str, Any] | None = None,
    nprobe: int | None = None,
    ef_search: int | None = None,
    refine: int = 0,
    mmap: bool = True,
    gpu: bool = False,
    verify: bool = True,
    **hashed: Any,
) -> Retriever:
    """Retrieval with faiss. path: an index folder, or a faiss file as Search-R1 builds it; without one the index is built in
    memory as `index` says (an index_factory string, Flat by default). See FaissIndex for nprobe, ef_search (an index
    folder knows what its build measured to be enough), refine, gpu. mmap: leave a file's vectors on disk. verify: encode a
    few passages again and compare, where single vectors can be read.
    """
    common = {"nprobe": nprobe, "ef_search": ef_search, "refine": refine, "gpu": gpu}
    if path is None:
        made = encoder_of(encoder, hashed, corpus)
        built, kept = build_faiss(index or "Flat", made, corpus, keep=refine > 0)
        vectors = FaissIndex(built, vectors=kept, **common, largest_norm=_norm(made))
        _tell_recall(f"retriever faiss, {index}", vectors, None)
        return CorpusRetriever(corpus, DenseIndex(made, vectors))
    _built_with("index", index)
    opened = open_index(Path(path), encoder, hashed, corpus)
    if opened.meta is not None and opened.meta.kind == "torch":
        raise ConfigError(f"{path}: an index of kind torch. Set retriever.name to torch, or build with --index Flat.")
    loaded = read_index(opened.index, mmap=mmap)
    check_count(opened.index, loaded.ntotal, corpus)
    measured = opened.meta.search if opened.meta is not None else None
    if nprobe is None and ef_search is None and measured is not None:
        common.update({name: measured[name] for name in ("nprobe", "ef_search") if name in measured})
    vectors = FaissIndex(loaded, vectors=opened.embeddings, **common, largest_norm=_norm(opened.encoder))
    _tell_recall(path, vectors, measured)
    retriever = CorpusRetriever(corpus, DenseIndex(opened.encoder, vectors))
    kept = opened.embeddings
    if verify and opened.meta is not None and kept is not None:
        verify_encoder(str(path), opened.encoder, corpus, lambda row, _: kept[row])
    elif verify and can_be_read(loaded):
        stored = partial(stored_vector, loaded)
        verify_encoder(str(path), opened.encoder, corpus, stored, exact=keeps_exactly(loaded))
    return retriever


@takes(NgramEncoder)
def torch_retriever(
    corpus: Sequence[Passage],
    *,
    path: str | None = None,
    encoder: str | Mapping[str, Any] | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    verify: bool = True,
    **hashed: Any,
) -> Retriever:
    """Exact retrieval with torch alone. path: an index folder with embeddings or a flat faiss file; without one the vectors are
    made in memory. dtype, device: of the scan, see TorchIndex; the results are those of the stored vectors in any case."""
    from rlflow_environments.retrieval.indices.torch_index import TorchIndex  # torch itself takes seconds to import

    if path is None:
        made = encoder_of(encoder, hashed, corpus)
        vectors = np.concatenate([block for _, block in encoded_blocks(made, corpus)])
        return CorpusRetriever(corpus, DenseIndex(made, TorchIndex(vectors, dtype=dtype, device=device)))
    opened = open_index(Path(path), encoder, hashed, corpus)
    if opened.embeddings is None:
        raise DataError(
            f"{path}: holds no embeddings for the retriever torch. Build with --index torch, or with --keep-embeddings."
        )
    check_count(Path(path), len(opened.embeddings), corpus)
    index = TorchIndex(opened.embeddings, dtype=dtype, device=device)
    retriever = CorpusRetriever(corpus, DenseIndex(opened.encoder, index))
    if verify:
        verify_encoder(str(path), opened.encoder, corpus, lambda row, _: index.stored(np.array([row]))[0])
    return retriever


def build_faiss(
    factory: str, encoder: Encoder, corpus: Sequence[Passage], *, keep: bool
) -> tuple[Any, np.ndarray | None]:
    """(trained and filled index, the vectors if `keep`)."""
    index = new_index(factory, encoder.dimensions)
    kept = []
    if not index.is_trained:
        index.train(encoder.encode_passages([corpus[row] for row in training_rows(index, len(corpus))]))
    for _, block in encoded_blocks(encoder, corpus):
        index.add(block)
        if keep:
            kept.append(block)
    return index, np.concatenate(kept) if keep else None


def training_rows(index: Any, count: int) -> list[int]:
    """Evenly spread rows to train an index on: enough for its lists. Raises ConfigError for more lists than rows."""
    lists = int(getattr(index, "nlist", 0)) or 256
    if lists > count:
        raise ConfigError(
            f"index: {lists} lists for {count} passages; expected at most a list per passage. Use fewer, or Flat."
        )
    wanted = min(count, max(65_536, lists * TRAINING_ROWS_PER_LIST))
    return [row * count // wanted for row in range(wanted)]


def encoded_blocks(encoder: Encoder, corpus: Sequence[Passage], start: int = 0) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, vectors) of block after block of the corpus from row `start`, a multiple of BLOCK."""
    for first in range(start, len(corpus), BLOCK):
        yield first, encoder.encode_passages(corpus[first : first + BLOCK])


def _tell_recall(where: str, vectors: FaissIndex, measured: Mapping[str, Any] | None) -> None:
    if vectors.searched:
        told, low = describe_recall(measured, vectors.searched)
        logger.log(logging.WARNING if low else logging.INFO, "%s: %s.", where, told)


def _norm(encoder: Encoder) -> float | None:
    """The bound on the vectors' lengths that exactness rests on; None where it has to be measured."""
    return _UNIT if getattr(encoder, "unit_vectors", False) else None


def _built_with(option: str, value: Any) -> None:
    if value is not None:
        raise ConfigError(f"retriever.{option}: decided when the index was built; remove it, or remove retriever.path.")
