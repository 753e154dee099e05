"""Claims about an environment in front of a real server: traces in its log, pages over HTTP, rates of the client's cache."""

from __future__ import annotations

import asyncio
import json

import pytest

from rlflow.net.http import Reply
from rlflow_environments.retrieval.client.answers import read_page
from rlflow_environments.retrieval.client.asynchronous import trace_id
from rlflow_environments.retrieval.client.client import HttpRetriever
from rlflow_environments.retrieval.corpus import write_rows
from rlflow_environments.retrieval.errors import ReplayMissError, RetrievalError
from rlflow_environments.retrieval.server.loading import ServedSource
from rlflow_environments.retrieval.server.statistics import QueryLog
from rlflow_environments.search import SearchEnvironment
from tests.unit.environments.retrieval.search_servers import (
    search_server,
    write_corpus,
    write_pages,
)
from tests.unit.environments.search.search_agents import converse

KNOWN = "https://w/index.php?title=Alder_0"


@pytest.fixture
def server(tmp_path):
    """(URL, service) over a small BM25 corpus with pages."""
    source = ServedSource({"name": "bm25"}, str(write_corpus(tmp_path)), str(write_pages(tmp_path)))
    with search_server(source.load) as (url, service):
        yield url, service


@pytest.fixture
def make(tmp_path, server):
    def made(**options) -> SearchEnvironment:
        train = write_rows(
            tmp_path / "train.jsonl", [{"id": "q7", "question": "where?", "solutions": ["harbour"]}]
        )
        retriever = {"name": "http", "url": server[0], **options.pop("retriever", {})}
        return SearchEnvironment(train=train, retriever=retriever, top_k=1, **options)

    return made


def test_a_trajectory_leads_to_its_lines_in_the_servers_log(make, server, tmp_path):
    log = server[1].query_log = QueryLog(tmp_path / "queries.jsonl")
    responses = ["<search>Alder number10</search>", "so <search>number12</search>"]
    steps = converse(make(), responses)
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "queries.jsonl").read_text().splitlines()]
    assert [line["trace"] for line in lines] == [
        trace_id("q7", responses[:1]),
        trace_id("q7", responses),
    ]
    assert [line["queries"] for line in lines] == [["Alder number10"], ["number12"]]
    assert "number12" in steps[1].observation


def test_pages_come_from_the_server_and_unknown_ones_are_said_to_be(make):
    environment = make(protocol="asearcher", tools=["search", "access"])
    known, read, unknown = converse(
        environment, [f"<access>{KNOWN}</access>", "a</think>", "<access>https://w/none</access>"]
    )
    assert (
        ">>>> Page 1 >>>>\n\npage 0\n</information>" in known.observation and read.observation == ""
    )
    assert "No More Information is Found for this URL." in unknown.observation


def test_a_recorded_episode_with_pages_replays_without_the_server(make, server, tmp_path):
    cache = {"directory": str(tmp_path / "cache"), "mode": "record"}
    says = [
        "<search>number10</search>",
        "a</think>",
        f"<access>{KNOWN}</access>",
        "b</think>",
        "<access>none</access>",
    ]
    options = {"protocol": "asearcher", "tools": ["search", "access"]}
    recorded = converse(make(retriever={"cache": cache}, **options), says)
    replaying = make(
        retriever={"cache": {**cache, "mode": "strict-replay"}, "url": "http://127.0.0.1:9"},
        **options,
    )
    assert [step.observation for step in converse(replaying, says)] == [
        step.observation for step in recorded
    ]
    assert replaying.report()["search/hit_rate"] == 1.0
    with pytest.raises(ReplayMissError, match="never seen"):
        converse(replaying, ["<access>never seen</access>"])


def test_the_hit_rate_is_that_of_the_clients_cache(make, tmp_path):
    cache = {"directory": str(tmp_path / "cache"), "mode": "replay"}
    environment = make(retriever={"cache": cache})
    converse(
        environment,
        ["<search>number10</search>", "<search>number11</search>", "<search>number10</search>"],
    )
    report = environment.report()
    assert report["search/hit_rate"] == pytest.approx(1 / 3) and report[
        "search/duplicate_rate"
    ] == pytest.approx(1 / 3)
    assert "search/hit_rate" not in environment.report()
    assert "search/hit_rate" not in make().report()


def test_an_answer_that_is_no_page_is_refused_by_name():
    assert read_page("http://s", Reply(200, {}, b'{"result": [null]}')) is None
    assert read_page("http://s", Reply(200, {}, b'{"result": [{"contents": "text"}]}')) == "text"
    for body, found in (
        (b'{"result": [{"text": 1}]}', "'contents' or null"),
        (b'{"result": []}', "1 elements"),
    ):
        with pytest.raises(RetrievalError, match=found):
            read_page("http://s", Reply(200, {}, body))


def test_pages_are_fetched_from_any_event_loop(server):
    retriever = HttpRetriever(server[0])
    assert [asyncio.run(retriever.page(KNOWN)) for _ in range(2)] == ["page 0", "page 0"]
