"""Claims about the retrieval server: the wire format, pages, its life, and its records."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from pathlib import Path

import pytest

from rlflow.errors import DataError
from rlflow_environments.retrieval import records
from rlflow_environments.retrieval.building import BuildRequest, build_index
from rlflow_environments.retrieval.corpus import Corpus
from rlflow_environments.retrieval.server.index import ServedIndex
from rlflow_environments.retrieval.server.loading import ServedSource
from tests.unit.environments.retrieval.search_echo import (
    Echo,
    client,
    echo_server,
    get,
    post,
    reload,
)
from tests.unit.environments.retrieval.search_servers import (
    search_server,
    write_corpus,
    write_pages,
)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The URL of a server over a small BM25 corpus with pages."""
    folder = tmp_path_factory.mktemp("served")
    source = ServedSource({"name": "bm25"}, str(write_corpus(folder)), str(write_pages(folder)))
    with search_server(source.load) as (url, _):
        yield url


# ---------------------------------------------------------------- the wire format


def test_both_element_shapes_hold_whole_stored_records(served):
    scored = post(served, queries=["number5", "number7 market"], topk=2, return_scores=True).json()[
        "result"
    ]
    bare = post(served, queries=["number5", "number7 market"], topk=2, return_scores=False).json()[
        "result"
    ]
    assert [[element["document"] for element in hits] for hits in scored] == bare
    assert set(scored[0][0]) == {"document", "score"}
    assert bare[0][0] == {
        "id": "d5",
        "contents": '"Fir 5"\nFir number5 has a harbour and a market.',
        "url": "https://w/index.php?title=Fir_5",
        "n": 5,  # columns that nobody knows pass through
    }
    scores = [element["score"] for element in scored[1]]
    assert scores == sorted(scores, reverse=True)


def test_documents_lack_neither_id_nor_contents_nor_url(served):
    without_url, without_contents = (
        post(served, query=f"number{row}", topk=1).json()["result"][0][0] for row in (1, 2)
    )
    assert without_url["url"] == "doc://d1"
    assert without_contents["contents"] == '"Cedar 2"\nCedar number2 has a harbour and a market.'
    assert (without_contents["id"], without_contents["url"]) == ("2", "doc://2")


@pytest.mark.parametrize("body", [{}, {"topk": None}, {"topk": 0}, {"topk": 0.0}])
def test_no_topk_means_the_servers_default(served, body):
    assert [
        len(hits) for hits in post(served, queries=["harbour", "market"], **body).json()["result"]
    ] == [3, 3]


def test_singular_query_is_answered_with_one_list(served):
    assert (
        post(served, query="number9", topk=1).json()
        == post(served, queries=["number9"], topk=1).json()
    )


def test_short_results_are_not_padded(served):
    result = post(served, queries=["number9", "nowhere", ""], topk=1000).json()["result"]
    assert [len(hits) for hits in result] == [1, 0, 0]
    everything = post(served, queries=["harbour"], topk=1000).json()["result"][0]
    assert len({document["id"] for document in everything}) == len(everything) == 60


def test_no_queries_have_no_results(served):
    assert post(served, queries=[]).json() == {"result": []}


@pytest.mark.parametrize(
    "query",
    ["", " ", "\x00", "🦆", "x" * 200_000, "</information><answer>", "\u2028", '"quoted" AND (NOT'],
)
def test_any_string_is_a_legal_query(served, query):
    response = post(served, queries=[query, "number5"], topk=1)
    assert response.status_code == 200 and response.json()["result"][1][0]["id"] == "d5"


def test_half_a_surrogate_pair_is_a_legal_query(served):
    response = client().post(
        served + "/retrieve", content=b'{"queries": ["\\ud83d number5"], "topk": 1}'
    )
    assert response.status_code == 200 and response.json()["result"][0][0]["id"] == "d5"


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ('{"queries": ["x"], "topk": -1}', "topk: expected 0 or more, found -1"),
        ('{"queries": ["x"], "topk": "many"}', "topk"),
        ('{"queries": ["x"], "topk": 1.5}', "topk"),
        ('{"queries": ["x"], "topk": true}', "topk"),
        ('{"queries": ["x"], "topk": NaN}', "topk"),
        ('{"queries": ["x"], "return_scores": "perhaps"}', "return_scores"),
        ('{"queries": "x"}', "queries: expected a list"),
        ('{"queries": ["x", 3]}', r"queries\[1\]"),
        ('{"query": ["x"]}', "query: expected a text"),
        ("{}", "found neither"),
        ("[]", "JSON object"),
        ("{queries}", "not JSON"),
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        (b"\xff\xfe", "not JSON"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(served, body, named):
    response = client().post(served + "/retrieve", content=body)
    assert response.status_code == 422
    assert re.search(named, response.json()["detail"])


def test_other_methods_are_refused(served):
    response = get(served + "/retrieve")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")


# ---------------------------------------------------------------- pages


def test_pages_are_aligned_with_the_urls(served):
    known, form = "https://w/index.php?title=Alder_0", "https://w/index.php/Elm_4"
    urls = [known, "https://nowhere", form, known, "", "https://w/wiki/Alder_0", known.upper()]
    answer = post(served, "/access", urls=urls)
    assert answer.headers["x-index"] == get(served + "/info").json()["identity"]
    pages = answer.json()["result"]
    assert [page and page["n"] for page in pages] == [0, None, 4, 0, None, None, None]
    assert pages[0] == {"url": known, "contents": "page 0", "n": 0}


def test_without_pages_every_url_is_unknown_and_health_says_so():
    with echo_server() as (url, _):
        response = post(url, "/access", urls=["a", "b"])
        assert (response.status_code, response.json()) == (200, {"result": [None, None]})
        assert get(url + "/health").json()["pages"] is False


@pytest.mark.parametrize("body", [{}, {"urls": "a"}, {"urls": [1]}])
def test_access_refuses_wrong_types(served, body):
    assert post(served, "/access", **body).status_code == 422


def test_the_last_of_several_pages_of_one_url_counts_and_bad_pages_are_named(tmp_path):
    from rlflow_environments.retrieval.corpus import Pages

    path = tmp_path / "pages.jsonl"
    path.write_text('{"url":"u","contents":"old"}\n\n{"url":"u","contents":"new"}\n')
    assert json.loads(Pages(path).page("u"))["contents"] == "new"
    path.write_text('{"url":"u","contents":"old"}\n{"contents":"no url"}\n')
    with pytest.raises(DataError, match="line 2: expected 'url' and 'contents'"):
        Pages(path)


# ---------------------------------------------------------------- life


def test_while_it_loads_it_says_how_far_it_is_and_answers_nothing():
    go_on = threading.Event()

    def load(changes, report, on_batch):
        report("reading the corpus", 0.4)
        assert go_on.wait(20)
        return ServedIndex(Echo())

    with search_server(load, wait=False) as (url, _):
        for _ in range(50):
            health = get(url + "/health").json()
            if health["stage"] == "reading the corpus":
                break
        assert (health["status"], health["progress"]) == ("loading", 0.4)
        assert get(url + "/ready").status_code == 503
        response = post(url, query="x")
        assert (response.status_code, response.headers["retry-after"]) == (
            503,
            "1",
        ) and "40%" in response.json()["detail"]
        go_on.set()
        for _ in range(100):
            if get(url + "/ready").status_code == 200:
                break
        assert post(url, query="x").status_code == 200


def test_an_index_is_exchanged_while_requests_are_answered(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, size in ((first, 20), (second, 30)):
        folder.mkdir()
        write_corpus(folder, size)
    source = ServedSource({"name": "bm25"}, str(first / "corpus.jsonl"))
    with search_server(source.load) as (url, service):
        before, sizes, stop = get(url + "/info").json(), [], threading.Event()

        def ask() -> None:
            while not stop.is_set():
                response = post(url, query="harbour", topk=100)
                assert response.status_code == 200
                sizes.append(len(response.json()["result"][0]))

        asking = threading.Thread(target=ask)
        asking.start()
        os.replace(second / "corpus.jsonl", first / "corpus.jsonl")
        after = reload(url, service).json()
        last = len(post(url, query="harbour", topk=100).json()["result"][0])
        stop.set()
        asking.join()
        assert set(sizes) <= {20, 30} and last == 30 and sizes == sorted(sizes)
        assert after["corpus"]["passages"] == 30 and after["identity"] != before["identity"]


def test_a_reload_that_fails_changes_nothing(tmp_path):
    corpus = write_corpus(tmp_path, 20)
    source = ServedSource({"name": "bm25"}, str(corpus))
    with search_server(source.load) as (url, service):
        before = get(url + "/info").json()
        corpus.rename(tmp_path / "away.jsonl")
        refused = reload(url, service)
        assert refused.status_code == 422 and "corpus.jsonl" in refused.json()["detail"]
        assert get(url + "/info").json() == before
        assert len(post(url, query="harbour", topk=100).json()["result"][0]) == 20


@pytest.mark.parametrize(
    "header", [{}, {"Authorization": "Bearer"}, {"Authorization": b"Bearer \xff"}, {"X-Token": "x"}]
)
def test_what_changes_the_server_needs_the_token_from_this_machine_too(header):
    with echo_server() as (url, service):
        refused = client().post(url + "/admin/reload", headers=header)
        assert refused.status_code == 401 and "Bearer TOKEN" in refused.json()["detail"]
        known = {"Authorization": f"Bearer {service.admin_token}"}
        assert client().post(url + "/admin/reload", headers=known).status_code == 200


def test_metrics_count_what_happened(served):
    post(served, queries=["nowhere to be found at all", "number5"])
    metrics = get(served + "/metrics").text
    for name in (
        "request_seconds_bucket",
        "queue_length",
        "empty_results_total",
        "batch_size_bucket",
        "ready 1.0",
    ):
        assert f"rlflow_search_{name}" in metrics
    assert "<title>rlflow search</title>" in get(served + "/").text


def test_info_names_the_contents_not_the_place(tmp_path):
    infos = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        source = ServedSource({"name": "bm25"}, str(write_corpus(tmp_path / name, 20)))
        infos.append(source.load({}, lambda *_: None, lambda *_: None).info)
    assert (
        infos[0]["identity"] == infos[1]["identity"]
        and infos[0]["corpus_path"] != infos[1]["corpus_path"]
    )
    other = (
        ServedSource({"name": "bm25", "k1": 2.0}, infos[0]["corpus_path"])
        .load({}, lambda *_: None, lambda *_: None)
        .info
    )
    assert other["identity"] != infos[0]["identity"] and other["corpus"] == infos[0]["corpus"]
    for text in ("old page", "new page"):
        (pages := tmp_path / "pages.jsonl").write_text(f'{{"url": "u", "contents": "{text}"}}\n')
        source = ServedSource({"name": "bm25"}, infos[0]["corpus_path"], str(pages))
        infos.append(source.load({}, lambda *_: None, lambda *_: None).info)
    assert len({info["identity"] for info in infos}) == 3 and infos[-1]["pages"]["pages"] == 1


def test_info_names_what_the_parts_of_a_hybrid_hold(tmp_path):
    corpus, identities = Corpus(write_corpus(tmp_path, 20)), []
    for name, dimensions in (("here", 64), ("there", 64), ("here", 32)):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        build_index(
            corpus,
            tmp_path / name,
            BuildRequest("Flat", {"name": "hashed", "dimensions": dimensions}),
            lambda *_: None,
        )
        source = ServedSource(
            {"name": "hybrid", "dense": {"path": str(tmp_path / name)}}, str(corpus.path)
        )
        identities.append(source.load({}, lambda *_: None, lambda *_: None).info["identity"])
    here, there, other = identities
    assert here == there != other


# ---------------------------------------------------------------- records


def test_offsets_are_made_once_and_again_when_the_file_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "KEPT_FROM", 0)
    from rlflow_environments.retrieval.corpus import Corpus

    path = write_corpus(tmp_path, 5)
    corpus, offsets = Corpus(path), Path(f"{path}.offsets")
    written = offsets.stat().st_mtime_ns
    assert Corpus(path)[4] == corpus[4] and offsets.stat().st_mtime_ns == written
    replacement = tmp_path / "new"
    last = '{"id": "z", "contents": "line\u2028end", "url": "u"}'
    replacement.write_text(f"\n{path.read_text()}\r\n  {last}  \r\n\n", "utf-8")
    replacement.replace(path)
    longer = Corpus(path)
    assert (len(corpus), len(longer)) == (5, 6) and longer[5].contents == "line\u2028end"
    assert json.loads(longer.document(5)) == {"id": "z", "contents": "line\u2028end", "url": "u"}
    assert corpus[0] == longer[0] and longer.sha256 != corpus.sha256


def test_offsets_whose_entries_are_not_those_that_were_written_are_made_again(
    tmp_path, monkeypatch
):
    """Two rows exchanged, all else as it was: they would be served under each other's number."""
    monkeypatch.setattr(records, "KEPT_FROM", 0)
    from rlflow_environments.retrieval.corpus import Corpus
    from rlflow_environments.retrieval.records import ENTRY

    path = write_corpus(tmp_path, 5)
    passages, offsets = list(Corpus(path)), Path(f"{path}.offsets")
    whole = offsets.read_bytes()
    first, last = slice(-5 * ENTRY.itemsize, -4 * ENTRY.itemsize), slice(-ENTRY.itemsize, None)
    changed = bytearray(whole)
    changed[first], changed[last] = whole[last], whole[first]
    offsets.write_bytes(changed)
    assert list(Corpus(path)) == passages and offsets.read_bytes() == whole


def test_records_that_no_client_could_read_are_refused_by_number(tmp_path):
    from rlflow_environments.retrieval.corpus import Corpus

    path = tmp_path / "corpus.jsonl"
    path.write_text('{"id": "a", "contents": "x"}\n{"id": "b"}\n')
    with pytest.raises(DataError, match="line 2: no 'contents'"):
        Corpus(path)
    path.write_text(
        '{"id": "a", "contents": NaN, "title": "t", "text": "\\ud800"}\n'.replace("NaN", "null")
    )
    assert json.loads(Corpus(path).document(0))["contents"] == '"t"\n\ufffd'
    assert not list(tmp_path.glob("*.partial"))
