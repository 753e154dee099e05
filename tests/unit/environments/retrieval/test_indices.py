"""Claims about vector indices: flat ones equal brute force, the others come close, no result depends on its batch."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.errors import ConfigError, DataError
from rlflow_environments.retrieval.encoders import NgramEncoder
from rlflow_environments.retrieval.indices import dense, make_retriever
from rlflow_environments.retrieval.indices.dense import DenseIndex, build_faiss
from rlflow_environments.retrieval.indices.faiss_index import (
    import_faiss,
    new_index,
    read_index,
    stored_vectors,
)
from rlflow_environments.retrieval.indices.folder import compared_rows, verify_encoder
from tests.unit.environments.retrieval.search_corpora import brute_force, clustered, passages

VECTORS = clustered(3000, 48)
QUERIES = clustered(70, 48, seed=1)
QUERIES[:20] = VECTORS[:20]  # exact twins in the index: ties at the top
PASSAGES = passages(300)
APPROXIMATE = {
    # factory string -> (options, recall@10 that it must reach)
    "SQ8": ({}, 0.9),
    "SQfp16": ({}, 0.98),
    "IVF32,Flat": ({"nprobe": 8}, 0.9),
    "IVF32,SQ8,RFlat": ({"nprobe": 32}, 0.99),
    "HNSW16": ({"ef_search": 128}, 0.9),
}


def filled(factory: str, vectors: np.ndarray = VECTORS):
    index = new_index(factory, vectors.shape[1])
    if not index.is_trained:
        index.train(vectors)
    index.add(vectors)
    return index


def ranked(index, **options) -> DenseIndex:
    return DenseIndex(SimpleNamespace(dimensions=index.d), index, **options)


def mapped_flat() -> DenseIndex:
    """As that of a large file, which is not scanned in memory."""
    index = ranked(filled("Flat"))
    index._vectors = None
    return index


EVERY = {
    "Flat": lambda: ranked(filled("Flat")),
    "Flat, mapped": mapped_flat,
    **{
        name: lambda name=name, options=options: ranked(filled(name), **options)
        for name, (options, _) in APPROXIMATE.items()
    },
}


@pytest.fixture(scope="module", params=EVERY)
def index(request):
    return EVERY[request.param]()


@pytest.fixture(scope="module")
def alone(index):
    """Each query searched by itself."""
    return [index.rank_vectors(query[None], 10)[0] for query in QUERIES]


@pytest.mark.parametrize("name", ["Flat", "Flat, mapped"])
def test_flat_indices_equal_brute_force(name):
    rankings = EVERY[name]().rank_vectors(QUERIES, 10)
    assert rows_of(rankings) == [brute_force(VECTORS, q, 10) for q in QUERIES]
    exact = [
        (VECTORS[[row for row, _ in r]].astype(np.float64) * q).sum(axis=1)
        for r, q in zip(rankings, QUERIES)
    ]
    assert [[score for _, score in ranking] for ranking in rankings] == [
        list(scores) for scores in exact
    ]
    everything = EVERY[name]().rank_vectors(QUERIES[:1], 5000)
    assert sorted(rows_of(everything)[0]) == list(range(len(VECTORS)))


def rows_of(rankings) -> list[list[int]]:
    return [[row for row, _ in ranking] for ranking in rankings]


@pytest.mark.parametrize("name", APPROXIMATE)
def test_approximate_indices_come_close_to_brute_force(name):
    rankings = EVERY[name]().rank_vectors(QUERIES, 10)
    found = [
        len({row for row, _ in r} & set(brute_force(VECTORS, q, 10))) / 10
        for r, q in zip(rankings, QUERIES)
    ]
    assert np.mean(found) >= APPROXIMATE[name][1]


def test_a_query_gets_the_same_alone_and_in_a_batch_of_all(index, alone):
    assert index.rank_vectors(QUERIES, 10) == alone


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_result_does_not_depend_on_what_else_is_in_the_batch(index, alone, data):
    """Any order, any size, repetitions: bit for bit what a query gets alone."""
    chosen = data.draw(st.lists(st.integers(0, len(QUERIES) - 1), min_size=1, max_size=60))
    assert index.rank_vectors(QUERIES[chosen], 10) == [alone[place] for place in chosen]


def test_rankings_are_ordered_and_distinct(alone):
    for ranking in alone:
        assert ranking == sorted(ranking, key=lambda item: (-item[1], item[0]))
        assert len({row for row, _ in ranking}) == len(ranking) == 10


def test_ivf_returns_what_its_lists_hold_and_no_padding():
    found = ranked(filled("IVF32,Flat"), nprobe=1).rank_vectors(QUERIES, 2000)
    assert all(0 < len(ranking) < 2000 and min(row for row, _ in ranking) >= 0 for ranking in found)


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_the_scan_gives_the_same_in_tiles_of_any_size_and_by_either_library(batch, monkeypatch):
    whole = ranked(filled("Flat")).rank_vectors(QUERIES[:batch], 10)
    monkeypatch.setattr(dense, "_TILE_ROWS", 7)
    monkeypatch.setattr(dense, "_TILE_SCORES", 100)
    monkeypatch.setattr(dense, "SHORT", 0)
    assert ranked(filled("Flat")).rank_vectors(QUERIES[:batch], 10) == whole


@pytest.mark.parametrize("make", [ranked, lambda index: mapped(index)], ids=["in memory", "mapped"])
def test_ranking_of_near_ties_does_not_depend_on_how_a_scan_sums(make):
    """300 vectors with one and the same inner product but for rounding; a scan proposes a few of them by its own rounding."""
    values = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    values /= np.linalg.norm(values)
    index = make(
        filled(
            "Flat", np.stack([np.random.default_rng(row).permutation(values) for row in range(300)])
        )
    )
    query = np.full((1, 64), 0.125, np.float32)
    everything = index.rank_vectors(query, 300)[0]
    assert index.rank_vectors(query, 3)[0] == everything[:3]
    assert index.rank_vectors(query.repeat(64, axis=0), 3) == [everything[:3]] * 64


def mapped(index) -> DenseIndex:
    made = ranked(index)
    made._vectors = None
    return made


@pytest.mark.parametrize("rounding", [2.0**-8, 2.0**-6])
def test_a_scan_that_proposes_wrongly_is_put_right(rounding, monkeypatch):
    """Scores are those of vectors that lost most of their digits, as on a GPU; the error is within the bound."""

    def rounded(vectors, queries, depth):
        scores = np.round((vectors @ queries.T).T / rounding) * rounding
        rows = np.argsort(-scores, axis=1, kind="stable")[:, ::-1][:, -depth:][:, ::-1]
        return np.take_along_axis(scores, rows, axis=1), rows

    monkeypatch.setattr(dense, "nearest", rounded)
    monkeypatch.setattr(dense, "_FLOAT32", rounding / VECTORS.shape[1])
    found = ranked(filled("Flat")).rank_vectors(QUERIES, 10)
    assert rows_of(found) == [brute_force(VECTORS, q, 10) for q in QUERIES]


@pytest.mark.parametrize(("available", "threads"), [(1 << 40, 0), (0, 32)])
def test_mapped_lists_are_read_ahead_only_where_memory_does_not_hold_them(
    available, threads, tmp_path, monkeypatch
):
    path = tmp_path / "index.faiss"
    faiss = import_faiss()
    faiss.write_index(filled("IVF32,SQ8"), str(path))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=available))
    index = read_index(path, mmap=True)
    assert faiss.downcast_InvertedLists(index.invlists).prefetch_nthread == threads


def test_vectors_of_any_length_are_ranked_by_inner_product():
    vectors = VECTORS * np.linspace(0.1, 50, len(VECTORS), dtype=np.float32)[:, None]
    found = ranked(filled("Flat", vectors)).rank_vectors(QUERIES, 5)
    assert rows_of(found) == [brute_force(vectors, q, 5) for q in QUERIES]


@pytest.mark.parametrize("factory", ["Flat", "SQ8", "IVF32,SQ8", "IVF32,Flat", "HNSW16"])
def test_a_memory_mapped_file_gives_the_same(factory, tmp_path, monkeypatch):
    monkeypatch.setattr("rlflow_environments.retrieval.indices.faiss_index.READ_BYTES", 0)
    path = tmp_path / "index.faiss"
    import_faiss().write_index(filled(factory), str(path))
    in_memory, from_file = (ranked(read_index(path, mmap=mmap)) for mmap in (False, True))
    assert factory != "Flat" or (in_memory._vectors is not None and from_file._vectors is None)
    assert in_memory.rank_vectors(QUERIES, 10) == from_file.rank_vectors(QUERIES, 10)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: new_index("IFV16,Flat", 48), "not an index_factory string"),
        (lambda: ranked(filled("Flat"), nprobe=4), "only an IVF index has it"),
        (lambda: ranked(filled("SQ8"), ef_search=4), "only an HNSW index has it"),
        (lambda: make_retriever({"name": "faiss", "nprobe": 0}, passages(9)), "number above 0"),
        (lambda: ranked(filled("Flat"), gpu=True), "no GPU support|no GPU here"),
    ],
)
def test_a_wrong_option_is_one_clear_error(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_other_files_and_other_metrics_are_refused(tmp_path):
    faiss = import_faiss()
    with pytest.raises(DataError, match="inner product"):
        ranked(faiss.IndexFlatL2(8))
    (tmp_path / "x").write_bytes(b"not an index at all")
    for path in (tmp_path / "x", tmp_path / "absent"):
        with pytest.raises(DataError, match="expected a faiss index"):
            read_index(path, mmap=True)


# ---------------------------------------------------------------- what an index was built with


@pytest.mark.parametrize(
    ("kind", "exact"),
    [("Flat", True), ("SQ8", True), ("SQ4", False), ("HNSW8", True), ("PQ4x4", False), ("IVF8,Flat", True), ("IVF20,SQ8", True),
     ("IVF20,PQ4x4", False), ("IVF20,SQ4", False)],
)  # fmt: skip
def test_every_kind_is_held_against_its_corpus_and_encoder(kind: str, exact: bool) -> None:
    encoder, rows = NgramEncoder(PASSAGES, dimensions=64), compared_rows(PASSAGES)
    stored, kept_exactly = stored_vectors(build_faiss(kind, encoder, PASSAGES), rows)
    assert kept_exactly is exact
    mine, others = [PASSAGES[row] for row in rows], [PASSAGES[::-1][row] for row in rows]
    verify_encoder("index", encoder, mine, stored, exact)
    for other_encoder, compared in ((encoder, others), (_Rolled(encoder), mine)):
        with pytest.raises(DataError, match=r"passage '\d+' of this corpus, encoded here"):
            verify_encoder("index", other_encoder, compared, stored, exact)


class _Rolled:
    """Another encoder: the same numbers in other dimensions."""

    def __init__(self, inner: NgramEncoder) -> None:
        self._inner = inner

    def encode_passages(self, found):
        return np.roll(self._inner.encode_passages(found), 7, axis=1)
