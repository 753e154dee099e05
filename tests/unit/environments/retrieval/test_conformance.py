"""The retrieval server keeps the wire format, by checks that fail each known fault for the right reason."""

from __future__ import annotations

import pytest

from rlflow_environments.retrieval.server.loading import ServedSource
from tests.unit.environments.retrieval.conformance import check_server
from tests.unit.environments.retrieval.faulty_server import FAULTS, FaultyServer
from tests.unit.environments.retrieval.search_servers import (
    search_server,
    serving,
    write_corpus,
    write_pages,
)


@pytest.mark.parametrize("retriever", ["bm25", "dense", "hybrid", "qdrant"])
def test_our_server_passes_with_every_backend(retriever, tmp_path):
    source = ServedSource(
        {"name": retriever}, str(write_corpus(tmp_path)), str(write_pages(tmp_path))
    )
    with search_server(source.load) as (url, _):
        verdicts = check_server(url, seeds=["harbour number3", "Alder", "market number4"])
    assert [(v.check.name, v.outcome, v.reason) for v in verdicts if v.outcome != "pass"] == []


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_each_known_fault_fails_its_check_and_no_other(fault):
    faults = [fault] if fault else []
    with serving(FaultyServer(*faults)) as url:
        failed = {v.check.name for v in check_server(url) if v.outcome == "fail"}
    assert failed == (FAULTS[fault][1] if fault else set())
