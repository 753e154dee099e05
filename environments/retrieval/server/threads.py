"""How many threads a search takes: one for a short scan, which is over before others have begun,
else all of this process."""

from __future__ import annotations

import os
import sys

from rlflow_environments.retrieval.encoders import NgramEncoder
from rlflow_environments.retrieval.indices import CorpusRetriever, DenseIndex, Retriever

SHORT = 16 << 20  # numbers that a query is multiplied with: what one core reads in some 5 ms


def is_short(retriever: Retriever) -> bool:
    """Whether a search is so short that its threads would mostly wait for each other, and for cores
    that clients hold. Never with a model as encoder."""
    index = retriever.index if isinstance(retriever, CorpusRetriever) else None
    if not isinstance(index, DenseIndex) or not isinstance(index.encoder, NgramEncoder):
        return False
    return index.vectors.scanned * index.vectors.dimensions <= SHORT


def own_threads() -> int:
    """How many this process may use: OMP_NUM_THREADS, else a thread per core."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return int(threads) if threads.isdigit() else len(os.sched_getaffinity(0))


def use_threads(count: int) -> None:
    """How many threads the searches of the calling thread use from now on: OpenMP counts for each
    thread that calls it."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(count)
    if "faiss" in sys.modules:
        sys.modules["faiss"].omp_set_num_threads(count)
