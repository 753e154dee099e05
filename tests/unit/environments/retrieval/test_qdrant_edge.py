"""Claims about Qdrant's own engine on a directory, for real."""

from __future__ import annotations

import signal
import subprocess
import sys

import numpy as np
import pytest

from rlflow.errors import ConfigError, DataError
from rlflow_environments.retrieval.building import BuildRequest, build_index
from rlflow_environments.retrieval.corpus import Corpus, write_corpus
from rlflow_environments.retrieval.encoders import NgramEncoder
from rlflow_environments.retrieval.indices import make_retriever
from rlflow_environments.retrieval.indices.qdrant_edge import EdgeCollection, Graph
from rlflow_environments.search.__main__ import main
from tests.unit.environments.retrieval.search_corpora import brute_force, passages

pytest.importorskip("qdrant_edge")

PASSAGES = [*passages(300), *passages(12)]  # the last twelve are twins of the first twelve
QUERIES = [passage.title for passage in PASSAGES[:30]] + ["", "zzz", "bada"]
REQUEST = BuildRequest("qdrant", {"name": "hashed", "dimensions": 64})
ENCODER = NgramEncoder(PASSAGES, dimensions=64)
VECTORS = ENCODER.encode_passages(PASSAGES)


def silent(stage, done, total):
    pass


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return Corpus(write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", PASSAGES))


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory):
    path = tmp_path_factory.mktemp("index")
    build_index(corpus, path, REQUEST, silent)
    return path


def test_results_are_the_nearest_passages_with_ties_by_row(folder, corpus):
    retriever = make_retriever({"name": "qdrant", "path": str(folder)}, corpus)
    for query, hits in zip(QUERIES, retriever.search(QUERIES, 5), strict=True):
        vector = ENCODER.encode_queries([query])[0]
        rows = brute_force(VECTORS, vector, 5) if vector.any() else []
        assert [hit.contents for hit in hits] == [PASSAGES[row].contents for row in rows]
        assert [hit.score for hit in hits] == pytest.approx(
            [float(VECTORS[row] @ vector) for row in rows], abs=1e-5
        )


def test_documents_and_encoder_come_from_the_folder(folder, corpus):
    alone = make_retriever({"name": "qdrant", "path": str(folder)}, None)
    faiss = make_retriever({"name": "faiss", "dimensions": 64}, corpus)
    assert [[hit.id for hit in hits] for hits in alone.search(QUERIES, 3)] == [
        [hit.id for hit in hits] for hits in faiss.search(QUERIES, 3)
    ]


def test_a_graph_finds_nearly_all_and_an_exact_search_all(tmp_path):
    draw = np.random.default_rng(0)
    vectors = draw.normal(size=(4000, 32)).astype(np.float32)
    queries = draw.normal(size=(50, 32)).astype(np.float32)
    path, graph = tmp_path / "graph", Graph(16, 64, from_kb=100)
    collection = EdgeCollection(path, 32, create=graph)
    collection.upsert(range(4000), vectors, [{"contents": str(row)} for row in range(4000)])
    assert collection.indexed() == 0
    collection.settle(silent)
    assert collection.indexed() == 4000
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    nearest = [set(row) for row in np.argsort(-(queries @ unit.T), axis=1)[:, :10].tolist()]

    def recall(**params):
        found = EdgeCollection(path, 32, params).query(queries, 10)
        return np.mean([len({p.id for p in few} & all_) for few, all_ in zip(found, nearest)]) / 10

    assert recall(exact=True) == 1.0
    assert recall(hnsw_ef=10) < 0.9, "it is the graph that is searched"
    assert recall(hnsw_ef=400) >= 0.98


KILLED = """
import sys, time
from rlflow_environments.retrieval.building import BuildRequest, build_index
from rlflow_environments.retrieval.corpus import Corpus
from rlflow_environments.retrieval.indices import qdrant
from pathlib import Path
qdrant._BATCH = 20
def report(stage, done, total):
    print(stage, done, flush=True)
    if done >= 60:
        time.sleep(600)
request = BuildRequest("qdrant", {"name": "hashed", "dimensions": 64})
build_index(Corpus(sys.argv[1]), Path(sys.argv[2]), request, report)
"""


def test_one_process_at_a_time_and_a_killed_build_goes_on(corpus, tmp_path):
    folder = tmp_path / "index"
    command = [sys.executable, "-c", KILLED, str(corpus.path), str(folder)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert any(line.startswith("storing points 60") for line in child.stdout)
        with pytest.raises(DataError, match="another process has this collection open"):
            EdgeCollection(folder / "qdrant", 64)
        with pytest.raises(DataError, match="a build that did not finish; run it again"):
            make_retriever({"name": "qdrant", "path": str(folder)}, corpus)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    collection = EdgeCollection(folder / "qdrant", 64)
    stored = collection.points(range(len(PASSAGES)), vectors=True)
    assert [point.id for point in stored] == list(range(60)), "what was acknowledged is there"
    assert np.abs(np.stack([point.vector for point in stored]) - VECTORS[:60]).max() < 1e-6
    del collection, stored
    assert build_index(corpus, folder, REQUEST, silent).count == len(PASSAGES)
    found = make_retriever({"name": "qdrant", "path": str(folder)}, corpus).search(QUERIES[:5], 1)
    assert [hits[0].title for hits in found] == QUERIES[:5]


def test_a_process_opens_it_as_often_as_it_likes_and_then_gives_it_up(folder, corpus):
    """A server that reads its index again has it open twice for a while, a run for training and evaluation."""
    component = {"name": "qdrant", "path": str(folder)}
    first, second = make_retriever(component, corpus), make_retriever(component, None)
    assert first.search(QUERIES[:3], 2) == second.search(QUERIES[:3], 2)
    del first, second
    code = "import sys, pathlib; from rlflow_environments.retrieval.indices.qdrant_edge import EdgeCollection as E;"
    code += "print(E(pathlib.Path(sys.argv[1]), 64).count())"
    command = [sys.executable, "-c", code, str(folder / "qdrant")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(len(PASSAGES))


def test_what_is_not_such_an_index_is_one_clear_error(folder, corpus, tmp_path):
    words = tmp_path / "words"
    build_index(corpus, words, BuildRequest("bm25"), silent)
    with pytest.raises(ConfigError, match=r"of kind bm25, expected qdrant.*name to bm25"):
        make_retriever({"name": "qdrant", "path": str(words)}, corpus)
    for name in ("faiss", "bm25"):
        with pytest.raises(ConfigError, match=r"Set retriever.name to qdrant"):
            make_retriever({"name": name, "path": str(folder)}, corpus)
    with pytest.raises(ConfigError, match="found both"):
        make_retriever({"name": "qdrant", "path": str(folder), "url": "http://h:1"}, corpus)
    other = Corpus(write_corpus(tmp_path / "other.jsonl", PASSAGES[::-1]))
    with pytest.raises(DataError, match="built on another corpus"):
        make_retriever({"name": "qdrant", "path": str(folder)}, other)
    with pytest.raises(DataError, match=r"Qdrant's engine: .*expected vector size 32, but got 64"):
        EdgeCollection(folder / "qdrant", 32)
    with pytest.raises(DataError, match="Qdrant's engine: "):
        EdgeCollection(tmp_path / "nothing", 64)


def test_the_commands_build_it_and_search_it(corpus, tmp_path, capsys):
    folder = tmp_path / "index"
    arguments = ["build", "--corpus", str(corpus.path), "--index", "qdrant"]
    assert main([*arguments, "--out", str(folder), "--set", "dimensions=64"]) == 0
    assert f"name: qdrant, path: {folder}" in capsys.readouterr().out
    assert main(["query", "--index", str(folder), QUERIES[2]]) == 0
    assert QUERIES[2] in capsys.readouterr().out
