"""Claims about approximate indices: a build measures how far to search, whoever opens the index does so, and a low recall is
said."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import faiss
import numpy as np
import pytest

from rlflow.errors import ConfigError, DataError
from rlflow_environments.retrieval.building import BuildRequest, build_index
from rlflow_environments.retrieval.commands.serve import add_arguments, make_source
from rlflow_environments.retrieval.corpus import Corpus, write_corpus
from rlflow_environments.retrieval.indices import faiss_index as recalls
from rlflow_environments.retrieval.indices import make_retriever
from rlflow_environments.retrieval.indices.dense import DenseIndex
from rlflow_environments.retrieval.indices.folder import read_meta
from rlflow_environments.search.__main__ import main
from tests.unit.environments.retrieval.search_corpora import clustered, passages

ENCODER = {"name": "hashed", "dimensions": 64}


def silent(stage, done, total):
    pass


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return Corpus(write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", passages(2000)))


@pytest.fixture(scope="module")
def exact(corpus):
    return make_retriever({"name": "dense", "dimensions": 64}, corpus)


def recall(retriever, exact, queries) -> float:
    found, expected = (
        [{p.id for p in hits} for hits in one.search(queries, recalls.TOP_K)]
        for one in (retriever, exact)
    )
    return float(
        np.mean([len(a & b) / recalls.TOP_K for a, b in zip(found, expected, strict=True)])
    )


@pytest.mark.parametrize(
    ("kind", "name"), [("IVF64,Flat", "nprobe"), ("IVF64,SQ8", "nprobe"), ("HNSW8", "ef_search")]
)
def test_a_folder_is_searched_as_far_as_its_build_measured_to_be_enough(
    kind, name, corpus, exact, tmp_path
):
    build_index(corpus, tmp_path, BuildRequest(kind, ENCODER), silent)
    search = read_meta(tmp_path).search
    assert search["target"] == recalls.TARGET <= search["recall"][str(search[name])]
    assert all(
        share < recalls.TARGET
        for value, share in search["recall"].items()
        if int(value) < search[name]
    )
    component = {"name": "faiss", "path": str(tmp_path)}
    retriever = make_retriever(component, corpus)
    assert retriever.index.searched == {name: search[name]}
    others = [
        " ".join(corpus[row].body.split()[:6]) for row in range(1, 2000, 20)
    ]  # none of which was measured with
    assert recall(retriever, exact, others) > 0.9
    assert recall(make_retriever({**component, name: 1}, corpus), exact, others) < 0.8


def test_a_stated_recall_is_reached_whatever_it_costs_and_by_default_what_is_affordable(
    corpus, tmp_path, monkeypatch
):
    monkeypatch.setattr(recalls, "AFFORDABLE_VECTORS", 1)
    found = {}
    for stated in (None, 0.5, 1.0):
        build_index(
            corpus,
            tmp_path / str(stated),
            BuildRequest("IVF64,Flat", ENCODER, recall=stated),
            silent,
        )
        found[stated] = read_meta(tmp_path / str(stated)).search
    assert (
        found[None]["nprobe"] == 16 and found[None]["recall"]["16"] < 0.95
    )  # a quarter of the lists
    assert found[0.5]["nprobe"] < 16 and found[1.0]["recall"][str(found[1.0]["nprobe"])] == 1.0
    with pytest.raises(ConfigError, match="recall: expected a share"):
        build_index(
            corpus, tmp_path / "typo", BuildRequest("IVF64,Flat", ENCODER, recall=95.0), silent
        )


def test_codes_that_lose_the_neighbours_are_not_searched_further_than_helps(tmp_path):
    vectors = clustered(2500, 32)
    index = faiss.index_factory(32, "IVF64,PQ4x4", faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add(vectors)
    search = recalls.measure_recall(index, clustered(100, 32, seed=1), iter([vectors]), 1.0)
    assert max(search["recall"].values()) < 0.9 and search["nprobe"] < 64 == max(
        map(int, search["recall"])
    )
    assert search["recall"][str(search["nprobe"])] >= max(search["recall"].values()) - recalls.SAME


def test_a_low_recall_is_said_at_the_build_and_when_it_is_opened(
    corpus, tmp_path, capsys, caplog, monkeypatch
):
    monkeypatch.setattr(recalls, "AFFORDABLE_VECTORS", 1)
    built = ["build", "--corpus", str(corpus.path), "--out", str(tmp_path), "--index", "IVF64,SQ8"]
    assert main([*built, "--set", "dimensions=64"]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if "recall@10" in line]
    assert (
        len(shown) == 1
        and shown[0].startswith("warning: nprobe 16: recall@10 0.")
        and "below 0.95" in shown[0]
    )
    component = {"name": "faiss", "path": str(tmp_path)}
    make_retriever(component, corpus)
    make_retriever({**component, "nprobe": 3}, corpus)
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    at_two = read_meta(tmp_path).search["recall"]["2"]
    assert (
        len(said) == 2
        and "nprobe 16: recall@10 0." in said[0]
        and f"nprobe 3: recall@10 {at_two:.2f}" in said[1]
    )


def test_an_index_that_nobody_measured_is_not_searched_in_one_list_and_says_so(
    corpus, tmp_path, caplog
):
    vectors = clustered(2000, 64)
    for factory, parameter, default in (("IVF32,Flat", "nprobe", 16), ("HNSW8", "ef_search", 64)):
        index = faiss.index_factory(64, factory, faiss.METRIC_INNER_PRODUCT)
        index.train(vectors)
        index.add(vectors)
        assert DenseIndex(SimpleNamespace(dimensions=64), index).searched == {parameter: default}
    index = faiss.index_factory(64, "IVF32,Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add(vectors)
    index.nprobe = 3  # whoever wrote the file chose it
    faiss.write_index(index, str(tmp_path / "theirs.index"))
    component = {
        "name": "faiss",
        "path": str(tmp_path / "theirs.index"),
        "encoder": ENCODER,
        "verify": False,
    }
    assert make_retriever(component, corpus).index.searched == {"nprobe": 3}
    assert "nprobe 3, a guess" in caplog.text and "never measured" in caplog.text


def test_an_option_of_serve_sets_nprobe_and_the_identity_tells_it(corpus, tmp_path):
    import argparse

    build_index(corpus, tmp_path, BuildRequest("IVF64,Flat", ENCODER), silent)
    parser = argparse.ArgumentParser()
    add_arguments(parser)

    def served(*flags):
        source = make_source(parser.parse_args(["--index", str(tmp_path), *flags]))
        return source.load({}, lambda stage, share: None, lambda size, seconds: None).info

    measured = read_meta(tmp_path).search["nprobe"]
    as_built, same, other = served(), served("--nprobe", str(measured)), served("--nprobe", "1")
    assert as_built["index"]["nprobe"] == measured and other["index"]["nprobe"] == 1
    assert as_built["identity"] == same["identity"] != other["identity"]


@pytest.mark.parametrize(
    "edit",
    [
        3,
        {},
        {"nprobe": 0, "queries": 9, "target": 0.9, "recall": {"1": 1.0}},
        {"nprobe": 1, "ef_search": 1, "queries": 9, "target": 0.9, "recall": {"1": 1.0}},
        {"nprobe": 1, "queries": 9, "target": 0.9, "recall": {}},
        {"nprobe": 1, "queries": 9, "target": 0.9, "recall": {"one": 1.0}},
        {"nprobe": 1, "queries": 9, "target": 0.9, "recall": {"1": "high"}},
    ],
)
def test_an_edited_measurement_is_one_clear_error(corpus, tmp_path, edit):
    build_index(corpus, tmp_path, BuildRequest("bm25"), silent)
    meta = json.loads((tmp_path / "meta.json").read_text())
    meta.pop("crc32")  # as one of an earlier version
    (tmp_path / "meta.json").write_text(json.dumps({**meta, "search": edit}))
    with pytest.raises(DataError, match=r"meta.json: cannot be read"):
        read_meta(tmp_path)


def test_a_value_that_could_be_but_is_not_the_builds_is_found_by_the_checksum(corpus, tmp_path):
    """Fewer lists searched would be fewer passages found, without a word."""
    build_index(corpus, tmp_path, BuildRequest("bm25"), silent)
    meta = json.loads((tmp_path / "meta.json").read_text())
    searched = {"nprobe": 1, "queries": 9, "target": 0.9, "recall": {"1": 1.0}}
    (tmp_path / "meta.json").write_text(json.dumps({**meta, "search": searched}))
    with pytest.raises(DataError, match="does not agree with its checksum"):
        read_meta(tmp_path)
