"""Claims about Qdrant: qdrant-client's memory for real, a server where QDRANT_URL is set, and the client's manners (URL, key,
timeout, tries) against a stub."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlflow.errors import ConfigError, DataError
from rlflow_environments.retrieval.corpus import Corpus, write_corpus
from rlflow_environments.retrieval.encoders import NgramEncoder
from rlflow_environments.retrieval.errors import RetrievalError
from rlflow_environments.retrieval.indices import make_retriever, qdrant
from rlflow_environments.retrieval.indices.qdrant import Collection, QdrantRetriever, fill
from rlflow_environments.retrieval.server.loading import ServedSource, describe
from rlflow_environments.search.__main__ import main
from tests.unit.environments.retrieval.qdrant_stub import QdrantStub, serving
from tests.unit.environments.retrieval.search_corpora import brute_force, passages

pytest.importorskip("qdrant_client")

PASSAGES = [*passages(300), *passages(12)]  # the last twelve are twins of the first twelve
QUERIES = [passage.title for passage in PASSAGES[:30]] + ["", "zzz", "bada"]
OPTIONS = {"dimensions": 64}
ENCODER = NgramEncoder(PASSAGES, **OPTIONS)
VECTORS = ENCODER.encode_passages(PASSAGES)


def silent(stage, done, total):
    pass


@pytest.fixture(scope="module")
def retriever():
    return make_retriever({"name": "qdrant", **OPTIONS}, PASSAGES)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return Corpus(write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", PASSAGES))


def test_results_are_the_nearest_passages_with_ties_by_row(retriever):
    for query, hits in zip(QUERIES, retriever.search(QUERIES, 5)):
        vector = ENCODER.encode_queries([query])[0]
        if not vector.any():
            assert hits == []
            continue
        rows = brute_force(VECTORS, vector, 5)
        assert [hit.contents for hit in hits] == [PASSAGES[row].contents for row in rows]
        assert [hit.score for hit in hits] == pytest.approx(
            [float(VECTORS[row] @ vector) for row in rows], abs=1e-5
        )


def test_changing_the_name_alone_changes_no_result(retriever):
    """What stands under `retriever:` is one line; vectors, ranking and ties are the same behind each name."""
    for name in ("dense", "faiss"):
        found = make_retriever({"name": name, **OPTIONS}, PASSAGES).search(QUERIES, 5)
        assert [[hit.id for hit in hits] for hits in found] == [
            [hit.id for hit in hits] for hits in retriever.search(QUERIES, 5)
        ]


def test_of_twins_the_earlier_row_comes_first(retriever):
    hits = retriever.search([PASSAGES[3].title], 2)[0]
    points = retriever.collection.query(ENCODER.encode_queries([PASSAGES[3].title]), 2)[0]
    assert hits[0].contents == hits[1].contents and hits[0].score == hits[1].score
    assert sorted(point.id for point in points) == [3, 303]


def test_a_result_does_not_depend_on_its_batch(retriever):
    alone = [retriever.search([query], 5)[0] for query in QUERIES]

    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.integers(0, len(QUERIES) - 1), min_size=1, max_size=40))
    def check(chosen):
        assert retriever.search([QUERIES[place] for place in chosen], 5) == [
            alone[place] for place in chosen
        ]

    check()


def test_short_results_and_top_k(retriever):
    assert len(retriever.search([QUERIES[0]], 1000)[0]) == len(PASSAGES)
    assert retriever.search([], 3) == []
    with pytest.raises(ConfigError, match="at least 1"):
        retriever.search(["x"], 0)


def test_an_ingest_that_was_stopped_goes_on_and_is_idempotent(tmp_path, monkeypatch):
    monkeypatch.setattr(qdrant, "_BATCH", 20)
    small = Corpus(write_corpus(tmp_path / "corpus.jsonl", PASSAGES[:80]))
    encoded: list[int] = []

    class Counting:
        dimensions = ENCODER.dimensions

        def encode_passages(self, chosen):
            encoded.append(len(chosen))
            if len(encoded) == 3 and not stopped:
                stopped.append(True)
                raise KeyboardInterrupt
            return ENCODER.encode_passages(chosen)

    stopped: list[bool] = []

    second = Collection(None, "wiki", create=64)
    with pytest.raises(KeyboardInterrupt):
        fill(second, Counting(), small, silent)
    assert second.count() == 40
    assert fill(second, Counting(), small, silent) == len(small) - 40
    assert fill(second, Counting(), small, silent) == 0
    stored = [
        point.vector
        for point in sorted(second.points(range(80), vectors=True), key=lambda point: point.id)
    ]
    assert np.abs(np.stack(stored) - VECTORS[:80]).max() < 1e-6
    assert [point.payload for point in second.points([0, 41, 79])] == [
        small.record(row) for row in (0, 41, 79)
    ]


def test_a_collection_of_another_corpus_or_encoder_is_refused(corpus, tmp_path):
    collection = Collection(None, "wiki", create=64)
    fill(collection, ENCODER, corpus, silent)
    swapped = [PASSAGES[1], PASSAGES[0], *PASSAGES[2:]]
    with pytest.raises(DataError, match="holds another corpus"):
        fill(collection, ENCODER, swapped, silent)
    with pytest.raises(DataError, match="Another model, prefix"):
        fill(
            collection,
            NgramEncoder(PASSAGES, dimensions=64, ngram_weight=0.9, title_weight=0.1),
            corpus,
            silent,
        )
    with pytest.raises(DataError, match="holds 312 points, the corpus 300"):
        fill(
            collection,
            ENCODER,
            Corpus(write_corpus(tmp_path / "short.jsonl", PASSAGES[:300])),
            silent,
        )
    with pytest.raises(DataError, match="makes 32 dimensions"):
        QdrantRetriever(NgramEncoder(PASSAGES, dimensions=32), collection)


# ---------------------------------------------------------------- a server's manners


@pytest.fixture
def stub():
    with serving(QdrantStub(VECTORS, [passage.fields for passage in PASSAGES])) as running:
        yield running


def remote(stub, **options):
    component = {
        "name": "qdrant",
        "url": stub.url,
        "collection": "wiki",
        "encoder": {"name": "hashed", **OPTIONS},
        **options,
    }
    return make_retriever(component, PASSAGES)


def test_a_collection_of_a_server_is_served_with_its_parameters(stub):
    retriever = remote(stub, hnsw_ef=256, quantization={"rescore": True, "oversampling": 2.0})
    embedded = make_retriever({"name": "qdrant", **OPTIONS}, PASSAGES).search(QUERIES, 3)
    assert [[hit.id for hit in hits] for hits in retriever.search(QUERIES, 3)] == [
        [hit.id for hit in hits] for hits in embedded
    ]
    params = stub.bodies[-1]["searches"][0]["params"]
    assert (
        params["hnsw_ef"] == 256
        and params["quantization"].items() >= {"rescore": True, "oversampling": 2.0}.items()
    )
    assert stub.requests[-1] == "POST /collections/wiki/points/query/batch", (
        "one request for a whole batch"
    )


def test_the_key_is_sent_and_a_refused_one_is_not_tried_again(stub, monkeypatch):
    stub.key = "s3cret"
    with pytest.raises(ConfigError, match=r"the key is refused \(401"):
        remote(stub)
    assert len(stub.requests) == 1
    assert remote(stub, api_key="s3cret").search(["x"], 1)
    monkeypatch.setenv("QDRANT_API_KEY", "s3cret")
    assert remote(stub).search(["x"], 1)


def test_faults_of_the_server_are_tried_again_up_to_tries(stub):
    retriever = remote(stub)
    expected = retriever.search(QUERIES, 3)
    stub.faults, before = [503, 429], len(stub.requests)
    assert retriever.search(QUERIES, 3) == expected
    assert len(stub.requests) == before + 3
    stub.faults, before = [500] * 9, len(stub.requests)
    with pytest.raises(RetrievalError, match="no answer after 3 tries"):
        retriever.search(QUERIES, 3)
    assert len(stub.requests) == before + 3


def test_the_identity_of_an_index_tells_what_its_collection_holds(stub):
    def identity():
        component = {
            "name": "qdrant",
            "url": stub.url,
            "collection": "wiki",
            "encoder": "my-encoder",
        }
        return describe(ServedSource(component), remote(stub), None, None)["identity"]

    before = identity()
    assert identity() == before
    for row in (5, len(PASSAGES) // 2):  # among the first, and in the middle
        stub.payloads[row] = {**stub.payloads[row], "title": "another"}
        assert identity() != before
        before = identity()


def test_a_request_that_is_wrong_is_not_tried_again(stub):
    retriever = remote(stub)
    stub.faults, before = [400], len(stub.requests)
    with pytest.raises(RetrievalError, match="400"):
        retriever.search(["bada"], 3)
    assert len(stub.requests) == before + 1


def test_a_server_that_hangs_times_out(stub):
    retriever = remote(stub, timeout_s=1, tries=2)
    stub.faults, began = [3.0, 3.0], time.monotonic()
    with pytest.raises(RetrievalError, match=r"after 2 tries .*timed out"):
        retriever.search(["bada"], 3)
    assert 2.0 <= time.monotonic() - began < 20.0


def test_no_server_no_collection_no_points_and_other_layouts_are_clear_errors(stub):
    with pytest.raises(DataError, match="collection 'wkii': there is none"):
        remote(stub, collection="wkii")
    stub.vectors_config = {"text": {"size": 64, "distance": "Cosine"}}
    with pytest.raises(DataError, match="one unnamed vector"):
        remote(stub)
    stub.vectors_config = {"size": 64, "distance": "Dot"}
    with pytest.raises(DataError, match="cosine distance"):
        remote(stub)
    stub.vectors_config, stub.payloads = None, []
    with pytest.raises(DataError, match="is empty"):
        remote(stub)
    stub.url = "http://127.0.0.1:9"
    with pytest.raises(RetrievalError, match="no answer after 1 tries"):
        remote(stub, tries=1)


def test_a_collection_of_another_encoder_is_found_at_once(stub):
    stub.vectors = np.roll(VECTORS, 1, axis=0)
    with pytest.raises(DataError, match="Another model, prefix"):
        remote(stub)
    assert remote(stub, verify=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": {"rescor": True}}, "Did you mean 'rescore'"),
        ({"tries": 0}, "tries: expected a whole number above 0"),
        ({"url": "http://localhost:1"}, "expected url and the encoder"),
        ({"urll": "x"}, "Did you mean 'url'"),
        ({}, "expected url and the encoder"),
    ],
)
def test_a_wrong_option_is_one_clear_error(options, message):
    with pytest.raises(ConfigError, match=message):
        make_retriever({"name": "qdrant", **options}, None)


@pytest.mark.skipif(
    "QDRANT_URL" not in os.environ,
    reason="needs a Qdrant server: set QDRANT_URL (and QDRANT_API_KEY)",
)
def test_a_real_server(corpus):
    from qdrant_client import QdrantClient

    url, name = os.environ["QDRANT_URL"], f"rlflow-test-{uuid.uuid4().hex[:8]}"
    arguments = [
        "build",
        "--corpus",
        str(corpus.path),
        "--index",
        "qdrant",
        "--url",
        url,
        "--collection",
        name,
    ]
    try:
        assert main([*arguments, "--set", "dimensions=64"]) == 0
        component = {"name": "qdrant", "url": url, "collection": name, **OPTIONS}
        found = make_retriever({**component, "hnsw_ef": 256}, corpus).search(QUERIES, 5)
        embedded = make_retriever({"name": "qdrant", **OPTIONS}, corpus).search(QUERIES, 5)
        assert [[hit.id for hit in hits] for hits in found] == [
            [hit.id for hit in hits] for hits in embedded
        ]
    finally:
        QdrantClient(url=url, api_key=os.environ.get("QDRANT_API_KEY")).delete_collection(name)


@pytest.mark.parametrize(
    ("statuses", "problem"),
    [
        (["yellow"] * 200 + ["grey", "green"], None),
        (["grey"] * 200, "found grey"),
        (["yellow", "red"], "found red"),
    ],
)
def test_waiting_for_the_servers_index_ends(monkeypatch, statuses, problem):
    seconds = iter(range(1000))
    clock = SimpleNamespace(monotonic=lambda: next(seconds), sleep=lambda _: None)
    monkeypatch.setattr(qdrant, "time", clock)
    found = (SimpleNamespace(status=status) for status in statuses)
    collection = object.__new__(qdrant.Collection)
    collection._where, collection._name = "http://h", "wiki"
    collection._client, collection._call = (
        SimpleNamespace(get_collection=None),
        lambda _: next(found),
    )
    with (
        contextlib.nullcontext()
        if problem is None
        else pytest.raises(RetrievalError, match=problem)
    ):
        collection.settle(silent)
