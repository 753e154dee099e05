"""Claims about threads: a short scan takes one, whichever thread asks, a long one or a model's all that the process may use."""

from __future__ import annotations

import asyncio

import pytest
import torch

from rlflow_environments.retrieval.encoders import NgramEncoder
from rlflow_environments.retrieval.indices import CorpusRetriever, DenseIndex
from rlflow_environments.retrieval.server.index import ServedIndex
from rlflow_environments.retrieval.server.threads import SHORT, use_threads
from tests.unit.environments.retrieval.search_corpora import passages

PASSAGES = passages(20)


class Vectors:
    """Notes with how many threads it is searched."""

    dimensions = 64

    def __init__(self, scanned: int) -> None:
        self.count, self.scanned = len(PASSAGES), scanned
        self.threads: list[int] = []

    def rank_vectors(self, vectors, top_k):
        self.threads.append(torch.get_num_threads())
        return [[(0, 1.0)] for _ in vectors]


def searched(scanned: int) -> set[int]:
    vectors = Vectors(scanned)
    served = ServedIndex(
        CorpusRetriever(PASSAGES, DenseIndex(NgramEncoder(PASSAGES, dimensions=64), vectors)),
        cache_bytes=0,
    )

    async def ask():  # the first batches by the index's thread, the later ones by the event loop
        for passage in PASSAGES:
            await served.answer([passage.title], 1)

    asyncio.run(ask())
    return set(vectors.threads)


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
