"""Claims about vector indices: exact ones equal brute force, approximate ones come close, no result depends on its batch."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.errors import ConfigError, DataError
from rlflow_environments.retrieval.indices import make_retriever
from rlflow_environments.retrieval.indices.exact import rank_exactly
from rlflow_environments.retrieval.indices.faiss_index import FaissIndex, import_faiss, new_index, read_index
from rlflow_environments.retrieval.indices.torch_index import TorchIndex
from tests.unit.environments.retrieval.search_corpora import brute_force, clustered, passages

VECTORS = clustered(3000, 48)
QUERIES = clustered(70, 48, seed=1)
QUERIES[:20] = VECTORS[:20]  # exact twins in the index: ties at the top
EXACT = {
    "faiss Flat": lambda: FaissIndex(filled("Flat")),
    "torch": lambda: TorchIndex(VECTORS),
    "torch bfloat16": lambda: TorchIndex(VECTORS, dtype="bfloat16"),
    "torch float16": lambda: TorchIndex(VECTORS, dtype="float16"),
}
APPROXIMATE = {
    # name -> (index, recall@10 that it must reach)
    "SQ8": (lambda: FaissIndex(filled("SQ8")), 0.9),
    "SQfp16": (lambda: FaissIndex(filled("SQfp16")), 0.98),
    "IVF32,Flat": (lambda: FaissIndex(filled("IVF32,Flat"), nprobe=8), 0.9),
    "IVF32,SQ8 refined": (lambda: FaissIndex(filled("IVF32,SQ8"), nprobe=32, refine=4, vectors=VECTORS), 0.999),
    "HNSW16": (lambda: FaissIndex(filled("HNSW16"), ef_search=128), 0.9),
    "PCA32,SQ8 refined": (lambda: FaissIndex(filled("PCA32,SQ8"), refine=20, vectors=VECTORS), 0.9),
}
EVERY = {**EXACT, **{name: make for name, (make, _) in APPROXIMATE.items()}}


def filled(factory):
    index = new_index(factory, VECTORS.shape[1])
    if not index.is_trained:
        index.train(VECTORS)
    index.add(VECTORS)
    return index


@pytest.fixture(scope="module", params=EVERY)
def index(request):
    return EVERY[request.param]()


@pytest.fixture(scope="module")
def alone(index):
    """Each query searched by itself."""
    return [index.rank_vectors(query[None], 10)[0] for query in QUERIES]


@pytest.mark.parametrize("name", EXACT)
def test_exact_indices_equal_brute_force(name):
    rankings = EXACT[name]().rank_vectors(QUERIES, 10)
    assert [[row for row, _ in ranking] for ranking in rankings] == [brute_force(VECTORS, q, 10) for q in QUERIES]
    exact = [(VECTORS[[row for row, _ in r]].astype(np.float64) * q).sum(axis=1) for r, q in zip(rankings, QUERIES)]
    assert [[score for _, score in ranking] for ranking in rankings] == [list(scores) for scores in exact]


@pytest.mark.parametrize("name", APPROXIMATE)
def test_approximate_indices_come_close_to_brute_force(name):
    make, expected = APPROXIMATE[name]
    rankings = make().rank_vectors(QUERIES, 10)
    found = [len({row for row, _ in r} & set(brute_force(VECTORS, q, 10))) / 10 for r, q in zip(rankings, QUERIES)]
    assert np.mean(found) >= expected


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


@pytest.mark.parametrize("name", EXACT)
def test_more_than_the_index_holds_is_everything_once(name):
    rows = [row for row, _ in EXACT[name]().rank_vectors(QUERIES[:1], 5000)[0]]
    assert sorted(rows) == list(range(len(VECTORS)))


def test_ivf_returns_what_its_lists_hold_and_no_padding():
    found = FaissIndex(filled("IVF32,Flat"), nprobe=1).rank_vectors(QUERIES, 2000)
    assert all(0 < len(ranking) < 2000 and min(row for row, _ in ranking) >= 0 for ranking in found)


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_the_torch_scan_gives_the_same_in_tiles_of_any_size(batch, monkeypatch):
    from rlflow_environments.retrieval.indices import torch_index

    whole = TorchIndex(VECTORS).rank_vectors(QUERIES[:batch], 10)
    monkeypatch.setattr(torch_index, "_MIN_TILE_ROWS", 7)
    monkeypatch.setitem(torch_index._TILE_SCORES, "cpu", 100)
    assert TorchIndex(VECTORS).rank_vectors(QUERIES[:batch], 10) == whole


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_error_bound_of_the_scan_holds_and_is_not_idle(dtype):
    scan = TorchIndex(VECTORS, dtype=dtype)
    scores, rows = scan.propose(QUERIES, len(VECTORS))
    for query, found, order, bound in zip(QUERIES, scores, rows, scan.error_bound(QUERIES)):
        error = np.abs(found - (VECTORS[order].astype(np.float64) * query).sum(axis=1)).max()
        assert error <= bound < 200 * max(error, 1e-8)


@pytest.mark.parametrize(("available", "threads"), [(1 << 40, 0), (0, 32)])
def test_mapped_lists_are_read_ahead_only_where_memory_does_not_hold_them(available, threads, tmp_path, monkeypatch):
    path = tmp_path / "index.faiss"
    faiss = import_faiss()
    faiss.write_index(filled("IVF32,SQ8"), str(path))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=available))
    index = read_index(path, mmap=True)
    assert faiss.downcast_InvertedLists(index.invlists).prefetch_nthread == threads


def test_results_are_those_of_the_stored_vectors_whatever_the_scan_rounds():
    """Rows that bfloat16 cannot tell apart, more of them than are proposed."""
    generator = np.random.default_rng(0)
    vectors = np.full((2000, 32), 1 / np.sqrt(32), np.float32) + 1e-5 * generator.standard_normal((2000, 32)).astype(
        np.float32
    )
    query = np.full((1, 32), 1 / np.sqrt(32), np.float32)
    found = TorchIndex(vectors, dtype="bfloat16").rank_vectors(query, 5)[0]
    assert [row for row, _ in found] == brute_force(vectors, query[0], 5)


def test_vectors_of_any_length_are_ranked_by_inner_product():
    vectors = VECTORS * np.linspace(0.1, 50, len(VECTORS), dtype=np.float32)[:, None]
    index = new_index("Flat", vectors.shape[1])
    index.add(vectors)
    for exact in (FaissIndex(index), TorchIndex(vectors), TorchIndex(vectors, dtype="bfloat16")):
        found = exact.rank_vectors(QUERIES, 5)
        assert [[row for row, _ in ranking] for ranking in found] == [brute_force(vectors, q, 5) for q in QUERIES]


def test_half_precision_embeddings_are_what_is_ranked():
    half = VECTORS.astype(np.float16)
    found = TorchIndex(half).rank_vectors(QUERIES, 5)
    assert [[row for row, _ in ranking] for ranking in found] == [brute_force(half, q, 5) for q in QUERIES]


@pytest.mark.parametrize("factory", ["Flat", "SQ8", "IVF32,SQ8", "IVF32,Flat", "HNSW16"])
def test_a_memory_mapped_file_gives_the_same(factory, tmp_path):
    path = tmp_path / "index.faiss"
    import_faiss().write_index(filled(factory), str(path))
    loaded, mapped = (FaissIndex(read_index(path, mmap=mmap)).rank_vectors(QUERIES, 10) for mmap in (False, True))
    assert loaded == mapped


def test_a_scan_that_proposes_wrongly_is_put_right():
    """The worst scan within its bound: it inverts the order of everything that lies within it."""

    class Inverted:
        count, overfetch, bound = len(VECTORS), 0, 0.05

        def scores(self, vector):
            exact = (VECTORS.astype(np.float64) * vector).sum(axis=1)
            cells = np.floor(exact / self.bound) * self.bound
            return cells + (self.bound - (exact - cells)) * 0.999

        def propose(self, vectors, depth):
            all_scores = np.stack([self.scores(vector) for vector in vectors])
            rows = np.argsort(-all_scores, axis=1)[:, :depth]
            return np.take_along_axis(all_scores, rows, axis=1), rows

        def at_least(self, vector, score):
            return np.flatnonzero(self.scores(vector) >= score - self.bound)

        def stored(self, rows):
            return VECTORS[rows]

        def error_bound(self, vectors):
            return np.full(len(vectors), self.bound)

    found = rank_exactly(Inverted(), QUERIES, 10)
    assert [[row for row, _ in ranking] for ranking in found] == [brute_force(VECTORS, q, 10) for q in QUERIES]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: new_index("IFV16,Flat", 48), "not an index_factory string"),
        (lambda: FaissIndex(filled("Flat"), nprobe=4), "only an IVF index has it"),
        (lambda: FaissIndex(filled("SQ8"), ef_search=4), "only an HNSW index has it"),
        (lambda: make_retriever({"name": "faiss", "nprobe": 0}, passages(9)), "number above 0"),
        (lambda: FaissIndex(filled("Flat"), refine=4), "keep-embeddings"),
        (lambda: FaissIndex(filled("Flat"), gpu=True), "no GPU support|no GPU here"),
        (lambda: make_retriever({"name": "torch", "dtype": "float61"}, passages(9)), "'float16'"),
        (lambda: TorchIndex(VECTORS, device="tpu"), "expected cpu, cuda"),
    ],
)
def test_a_wrong_option_is_one_clear_error(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_other_files_and_other_metrics_are_refused(tmp_path):
    faiss = import_faiss()
    with pytest.raises(DataError, match="inner product"):
        FaissIndex(faiss.IndexFlatL2(8))
    (tmp_path / "x").write_bytes(b"not an index at all")
    for path in (tmp_path / "x", tmp_path / "absent"):
        with pytest.raises(DataError, match="expected a faiss index"):
            read_index(path, mmap=True)
