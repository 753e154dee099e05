"""Claims about `rlflow search check`: it passes what is right and fails each known fault for the right reason."""

from __future__ import annotations

import argparse

import pytest

from rlflow_environments.retrieval.commands import check
from rlflow_environments.retrieval.conformance import check_server
from rlflow_environments.retrieval.server.addresses import bind
from rlflow_environments.retrieval.server.loading import ServedSource
from tests.unit.environments.retrieval.faulty_server import FAULTS, FaultyServer
from tests.unit.environments.retrieval.field_servers import rlinf, search_r1
from tests.unit.environments.retrieval.search_servers import (
    search_server,
    serving,
    write_corpus,
    write_pages,
)


def failed(url: str, **options) -> set[str]:
    return {
        verdict.check.name for verdict in check_server(url, **options) if verdict.outcome == "fail"
    }


@pytest.mark.parametrize("retriever", ["bm25", "dense", "hybrid", "qdrant"])
def test_our_server_passes_with_every_backend(retriever, tmp_path):
    source = ServedSource(
        {"name": retriever}, str(write_corpus(tmp_path)), str(write_pages(tmp_path))
    )
    with search_server(source.load) as (url, _):
        verdicts = check_server(url, seeds=["harbour number3", "Alder", "market number4"])
    assert [(v.check.name, v.outcome, v.reason) for v in verdicts if v.outcome != "pass"] == []


def test_a_right_server_of_somebody_else_passes():
    with serving(FaultyServer()) as url:
        verdicts = check_server(url)
    assert {v.outcome for v in verdicts if v.check.required} == {"pass"}
    assert {v.check.name for v in verdicts if v.outcome == "missing"} == {
        "health",
        "ready",
        "info",
        "metrics",
    }


@pytest.mark.parametrize("fault", FAULTS)
def test_each_known_fault_fails_its_check_and_no_other(fault):
    with serving(FaultyServer(fault)) as url:
        assert failed(url) == FAULTS[fault][1]


def test_several_faults_are_all_named(capsys):
    faults = ("needs topk", "has no urls", "refuses no queries")
    with serving(FaultyServer(*faults)) as url:
        args = argparse.Namespace(url=url, query=None, timeout_s=20.0)
        assert check.run(args) == 1
    shown = capsys.readouterr().out
    assert (
        "FAIL  default topk" in shown
        and "status 500: " in shown
        and "a document has no 'url'" in shown
    )
    assert (
        shown.splitlines()[-1]
        == "14 of 17 required checks pass; failed: documents, default topk, no queries"
    )


def test_what_is_no_server_is_said_to_be_none(capsys):
    with bind("127.0.0.1", 0) as unused:
        port = unused.getsockname()[1]
    assert check.run(argparse.Namespace(url=f"127.0.0.1:{port}", query=None, timeout_s=5.0)) == 2
    assert "does not answer a search" in capsys.readouterr().err


def test_a_server_that_finds_nothing_is_not_called_right(capsys):
    with serving(FaultyServer()) as url:
        assert check.run(argparse.Namespace(url=url, query=["xylophone"], timeout_s=5.0)) == 1
    assert "--query" in capsys.readouterr().err


def test_the_servers_of_the_field_fail_for_what_they_do_and_not_for_what_was_asked_before():
    with serving(search_r1()) as url:
        assert failed(url) == {"no scores", "documents", "query", "bad topk", "no padding"}
    with serving(rlinf()) as url:
        assert failed(url) == {
            "default topk",
            "query",
            "bad topk",
            "no padding",
            "pages",
            "no pages",
        }
