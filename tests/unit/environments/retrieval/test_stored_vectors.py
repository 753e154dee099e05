"""Indices that keep no embeddings: a corpus that they were not built on, or another encoder, is found by a few passages."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from rlflow.errors import DataError
from rlflow_environments.retrieval.encoders import NgramEncoder
from rlflow_environments.retrieval.indices.dense import build_faiss
from rlflow_environments.retrieval.indices.opening import verify_encoder
from rlflow_environments.retrieval.indices.stored_vectors import can_be_read, keeps_exactly, stored_vector
from tests.unit.environments.retrieval.search_corpora import passages

PASSAGES = passages(300)


@pytest.mark.parametrize(
    ("kind", "exact"),
    [("Flat", True), ("SQ8", True), ("SQ4", False), ("HNSW8", True), ("PQ4x4", False), ("IVF8,Flat", True), ("IVF20,SQ8", True),
     ("IVF20,PQ4x4", False), ("IVF20,SQ4", False)],
)  # fmt: skip
def test_every_kind_is_held_against_its_corpus_and_encoder(kind: str, exact: bool) -> None:
    encoder = NgramEncoder(PASSAGES, dimensions=64)
    index, _ = build_faiss(kind, encoder, PASSAGES, keep=False)
    assert can_be_read(index) and keeps_exactly(index) is exact
    verify_encoder("index", encoder, PASSAGES, partial(stored_vector, index), exact=exact)
    with pytest.raises(DataError, match=r"passage \d+ of this corpus"):
        verify_encoder("index", encoder, PASSAGES[::-1], partial(stored_vector, index), exact=exact)
    with pytest.raises(DataError, match="of this corpus, encoded here"):
        verify_encoder("index", _Rolled(encoder), PASSAGES, partial(stored_vector, index), exact=exact)


class _Rolled:
    """Another encoder: the same numbers in other dimensions."""

    def __init__(self, inner: NgramEncoder) -> None:
        self._inner = inner

    def encode_passages(self, found):
        return np.roll(self._inner.encode_passages(found), 7, axis=1)


def test_lists_behind_a_transform_are_left_alone() -> None:
    encoder = NgramEncoder(PASSAGES, dimensions=64)
    index, _ = build_faiss("PCA32,IVF8,Flat", encoder, PASSAGES, keep=False)
    assert not can_be_read(index)
