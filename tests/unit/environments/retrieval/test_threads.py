"""Claims about threads: a short scan takes one, whichever thread asks, a long one or a model's all that the process may use."""

from __future__ import annotations

import asyncio

import pytest
import torch

from rlflow_environments.retrieval.encoders import NgramEncoder
from rlflow_environments.retrieval.indices import CorpusRetriever
from rlflow_environments.retrieval.indices.base import SHORT
from rlflow_environments.retrieval.indices.dense import DenseIndex, build_faiss
from rlflow_environments.retrieval.server.index import ServedIndex, use_threads
from tests.unit.environments.retrieval.search_corpora import passages

PASSAGES = passages(20)
ENCODER = NgramEncoder(PASSAGES, dimensions=64)


class Noting(DenseIndex):
    """Notes with how many threads it is searched. scanned: what it says of its size."""

    scanned = 0

    def rank_vectors(self, vectors, top_k):
        self.threads.append(torch.get_num_threads())
        return [[(0, 1.0)] for _ in vectors]


def searched(scanned: int) -> set[int]:
    index = Noting(ENCODER, build_faiss("Flat", ENCODER, PASSAGES))
    index.scanned, index.threads = scanned, []
    served = ServedIndex(CorpusRetriever(PASSAGES, index), cache_bytes=0)

    async def ask():  # the first batches by the index's thread, the later ones by the event loop
        for passage in PASSAGES:
            await served.answer([passage.title], 1)

    asyncio.run(ask())
    return set(index.threads)


@pytest.fixture
def three(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    yield
    use_threads(before)


def test_a_short_scan_takes_one_thread_and_a_long_one_all(three):
    assert searched(SHORT // 64) == {1}
    assert searched(SHORT // 64 + 1) == {3}
    assert searched(SHORT // 64) == {1}, "after a reload, too"
