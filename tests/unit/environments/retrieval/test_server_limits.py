"""Claims about the server under clients that mean harm or know no better: each is refused by name and nobody else waits."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import re
import resource
import signal
import socket
import threading
import time

import pytest

from rlflow.errors import ConfigError
from rlflow_environments.common import connections
from rlflow_environments.retrieval.coalescer import CoalescedSearch
from rlflow_environments.retrieval.server import addresses, wire
from rlflow_environments.retrieval.server.addresses import DiscoveryFile, bind
from rlflow_environments.retrieval.server.app import SearchApp
from rlflow_environments.retrieval.server.index import Answer, ServedIndex
from rlflow_environments.retrieval.server.loading import ServedSource
from rlflow_environments.retrieval.server.process import serve
from rlflow_environments.retrieval.server.service import SearchService
from rlflow_environments.retrieval.server.statistics import QueryLog
from tests.unit.environments.retrieval.search_echo import (
    Echo,
    client,
    echo_server,
    get,
    post,
    reload,
)
from tests.unit.environments.retrieval.search_servers import search_server, write_corpus


@pytest.fixture(scope="module")
def served():
    with echo_server() as (url, _):
        yield url


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ("[" * 1000 + "]" * 1000, 422, "JSON"),
        ("[" * 900 + "]" * 900, 422, "JSON object"),
        ('{"queries": ' + "[" * 990 + "]" * 990 + "}", 422, r"queries\[0\]|nested"),
        ('{"queries": ["x"], "topk": ' + "[" * 900 + "]" * 900 + "}", 422, "topk"),
        ('{"queries": ["x"], "topk": ' + "9" * 5000 + "}", 422, "JSON|topk"),
        ('{"queries": ["x"], "topk": 1e999}', 422, "topk|JSON"),
        (
            json.dumps({"queries": ["x"] * (wire.MAX_QUERIES + 1)}),
            413,
            f"at most {wire.MAX_QUERIES} in one request",
        ),
        (
            json.dumps({"query": "x" * (wire.MAX_TEXT + 1)}),
            413,
            f"at most {wire.MAX_TEXT} characters",
        ),
        (
            json.dumps({"queries": ["x" * wire.MAX_TEXT] * 17}),
            413,
            f"at most {wire.MAX_TEXTS} characters in one request",
        ),
    ],
)
def test_what_would_cost_too_much_is_refused_with_the_limit(served, body, status, named):
    response = client().post(served + "/retrieve", content=body)
    assert response.status_code == status
    assert re.search(named, response.json()["detail"])


def test_a_request_of_many_queries_lets_others_have_their_turn():
    retriever = Echo()
    retriever.open.clear()

    async def scenario() -> None:
        search: CoalescedSearch = CoalescedSearch(retriever, max_batch=32)
        many = search.submit([f"m{i}" for i in range(2000)], 1)
        while not retriever.started.is_set():
            await asyncio.sleep(0.001)
        few = search.submit(["f"], 1)
        retriever.open.set()
        await few.done
        await many.done

    asyncio.run(scenario())
    order = [query for queries, _ in retriever.batches for query in queries]
    assert len(order) == 2001 and order.index("f") <= 100


def test_long_queries_do_not_share_a_batch():
    retriever = Echo()

    async def scenario() -> None:
        search: CoalescedSearch = CoalescedSearch(retriever, max_batch=32)
        await search.submit([f"{i}" * 60_000 for i in range(4)], 1).done

    asyncio.run(scenario())
    assert max(sum(map(len, queries)) for queries, _ in retriever.batches) <= 120_000


@pytest.mark.parametrize(
    "changes",
    [
        {"corpus": 5}, {"pages": ["x"]}, {"retriever": 7}, {"retriever": {"options": 1}}, {"retriever": None},
        {"corpus": "x" * 5000}, {"corpus": "/etc/passwd"}, {"pages": None}, {"retriever": "bm25"},
        {"retriever": {"k1": "1"}}, {"retriever": {"path": 3}}, {"retriever": {"path": "/etc"}},
        {"retriever": {"name": "dense"}}, {"retriever": {"name": ["bm25"]}},
        {"retriever": {"name": "subprocess:getoutput", "cmd": "true"}}, {"retriever": {"b": {"name": "os:system"}}},
    ],
)  # fmt: skip
def test_a_reload_takes_no_text_and_no_other_kind_and_changes_nothing_then(tmp_path, changes):
    """Each of these was taken, or would be where only some forms of code were looked for."""
    source = ServedSource({"name": "bm25"}, str(write_corpus(tmp_path, 5)))
    with search_server(source.load) as (url, service):
        refused = reload(url, service, **changes)
        assert refused.status_code == 422 and next(iter(changes)) in refused.json()["detail"]
        assert post(url, query="harbour").status_code == 200


def test_a_reload_runs_nothing_that_its_sender_names(tmp_path):
    source = ServedSource({"name": "bm25"}, str(write_corpus(tmp_path, 5)))
    asked = {"name": "subprocess:getoutput", "cmd": f"touch {tmp_path / 'ran'}"}
    with search_server(source.load) as (url, service):
        assert post(url, "/admin/reload", retriever=asked).status_code == 401
        assert reload(url, service, retriever=asked).status_code == 422
    assert not (tmp_path / "ran").exists()


def test_a_reload_nested_too_deeply_is_refused(tmp_path):
    source = ServedSource({"name": "bm25"}, str(write_corpus(tmp_path, 5)))
    with search_server(source.load) as (url, service):
        for place in ("retriever", "elsewhere"):
            body = f'{{"{place}": {"[" * 1000}{"]" * 1000}}}'
            headers = {"Authorization": f"Bearer {service.admin_token}"}
            assert (
                client().post(url + "/admin/reload", content=body, headers=headers).status_code
                == 422
            )


def test_a_reload_takes_other_numbers_for_options_of_the_configured_retriever(tmp_path):
    source = ServedSource({"name": "bm25", "b": 0.5}, str(write_corpus(tmp_path, 5)))
    with search_server(source.load) as (url, service):
        found = reload(url, service, retriever={"name": "bm25", "k1": 1.25}).json()["index"]
        assert (found["name"], found["k1"], found["b"]) == ("bm25", 1.25, 0.5)
        assert reload(url, service, retriever={"k2": 1}).status_code == 422


def test_a_reload_whose_client_goes_away_is_no_error_of_the_server():
    async def scenario() -> list[dict]:
        service = SearchService(lambda *_: ServedIndex(Echo()))
        await service.load()
        token = [(b"authorization", f"Bearer {service.admin_token}".encode())]
        sent: list[dict] = []
        received = iter(
            [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
        )

        async def receive() -> dict:
            return next(received)

        async def send(message: dict) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/admin/reload", "headers": token, "query_string": b"",
                 "root_path": "",
                 "client": ("127.0.0.1", 1), "server": ("h", 1), "scheme": "http", "http_version": "1.1"}  # fmt: skip
        await SearchApp(service)(scope, receive, send)
        return sent

    assert asyncio.run(scenario())[0]["status"] == 400


def test_what_is_said_of_an_index_can_be_written_whatever_it_holds():
    """Half of an emoji in a path made every later answer about the index a 500."""
    echo = ServedIndex(
        Echo(), info={"identity": "x", "corpus_path": "\ud83d.jsonl", "size": float("nan")}
    )
    with search_server(lambda *_: echo) as (url, service):
        assert get(url + "/info").json()["corpus_path"] == "\ud83d.jsonl"
        assert reload(url, service).status_code == 200


class _FullDisk:
    """A file that takes some bytes, then none."""

    def __init__(self, room: int) -> None:
        self.room, self.data = room, b""

    def write(self, data: bytes) -> int:
        taken = bytes(data)[: self.room]
        if data and not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.data += taken
        self.room -= len(taken)
        return len(taken)

    def close(self) -> None: ...


def test_a_full_disk_costs_lines_of_the_query_log_and_nothing_else(tmp_path, caplog):
    log = QueryLog(tmp_path / "log.jsonl")
    log._file.close()
    disk = log._file = _FullDisk(100)  # type: ignore[assignment]
    for _ in range(3):
        log.write("t", ["q"], 1, Answer([[(b'{"id": "1"}', 0.5)]]), 0.1)
        log.flush()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    disk.room = 10_000
    log.write("last", ["q"], 1, Answer([[(b'{"id": "1"}', 0.5)]]), 0.1)
    log.close()
    assert json.loads(disk.data.splitlines()[-1])["trace"] == "last"


def test_half_a_surrogate_pair_in_a_document_can_be_logged(tmp_path):
    log = QueryLog(tmp_path / "log.jsonl")
    log.write("t", ["\ud83d"], 1, Answer([[(b'{"id": "a\\ud83d"}', 0.5)]]), 0.1)
    log.close()
    assert json.loads((tmp_path / "log.jsonl").read_text())["ids"] == [["a\ufffd"]]


def test_connections_that_never_ask_are_closed_and_those_that_do_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "WHOLE_REQUEST_S", 0.5)
    service = SearchService(ServedSource({"name": "bm25"}, str(write_corpus(tmp_path, 5))).load)
    listener = bind("127.0.0.1", 0)
    address, ready = listener.getsockname(), threading.Event()
    options = {"on_ready": ready.set}
    threading.Thread(target=serve, args=(service, listener), kwargs=options, daemon=True).start()
    assert ready.wait(20)
    head = b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    quiet = [b"", b"POST /retr", head % 40, head % 40 + b'{"query"']
    sockets = [socket.create_connection(address, 5) for _ in quiet]
    for connection, sent in zip(sockets, quiet, strict=True):
        connection.sendall(sent)
    asking = socket.create_connection(address, 5)
    body = b'{"query": "harbour"}'
    for _ in range(4):
        asking.sendall(head % len(body) + body)
        assert asking.recv(65536).startswith(b"HTTP/1.1 200")
        time.sleep(0.25)
    for connection in sockets:
        connection.settimeout(5)
        while connection.recv(65536):
            pass


def test_many_files_may_be_open():
    addresses.allow_many_files()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == resource.RLIM_INFINITY or soft >= min(
        hard if hard > 0 else soft, addresses.FILES_WANTED
    )


def test_a_server_in_this_process_gives_the_signals_back_that_it_took(tmp_path):
    source = ServedSource({"name": "bm25"}, str(write_corpus(tmp_path, 5)))
    numbers = signal.SIGHUP, signal.SIGUSR1, signal.SIGINT, signal.SIGTERM
    before = [signal.getsignal(number) for number in numbers]
    taken = []

    def ready():
        taken.extend(signal.getsignal(number) for number in numbers)
        signal.raise_signal(signal.SIGTERM)

    serve(SearchService(source.load), bind("127.0.0.1", 0), on_ready=ready)
    assert [signal.getsignal(number) for number in numbers] == before
    assert len(taken) == 4 and not set(taken) & set(before)


def test_a_server_that_nobody_could_find_does_not_serve(tmp_path):
    source = ServedSource({"name": "bm25"}, str(write_corpus(tmp_path, 5)))
    folder = tmp_path / "addresses"
    discovery = DiscoveryFile(folder, "127.0.0.1", 1)
    folder.rmdir()
    folder.write_text("in the way")
    with pytest.raises(ConfigError, match=r"save-address-to.*cannot be written"):
        serve(SearchService(source.load), bind("127.0.0.1", 0), on_ready=discovery.write)
