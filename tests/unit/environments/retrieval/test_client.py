"""Claims about the client: which failures it survives, and how long it tries."""

from __future__ import annotations

import asyncio
import json
import random
import time

import pytest

from rlflow.errors import ConfigError, PolicyError
from rlflow_environments.retrieval.client.client import HttpRetriever
from rlflow_environments.retrieval.client.servers import ServerPool, server_url
from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.retrieval.errors import RetrievalError
from rlflow_environments.retrieval.indices import make_retriever
from rlflow_environments.retrieval.server.addresses import DiscoveryFile, bind, read_addresses
from tests.unit.environments.retrieval.scripted_server import CUT, HANG, Scripted, client
from tests.unit.environments.retrieval.search_servers import serving

# ---------------------------------------------------------------- one server


def test_passages_come_back_in_order_with_scores():
    server = Scripted()
    with serving(server) as url:
        found = client(url).search(["a", "b"], 2)
    assert [[(p.id, p.title, p.score, p.url) for p in hits] for hits in found] == [
        [("s/a", "a", 0.5, "doc://s/a")] * 2,
        [("s/b", "b", 0.5, "doc://s/b")] * 2,
    ]
    _, request, headers = server.requests[0]
    assert request == {"queries": ["a", "b"], "topk": 2, "return_scores": True}
    assert 0 < float(headers["x-deadline-s"]) <= 5.0
    assert len(server.requests) == 1


def test_bare_documents_and_title_with_text_are_understood():
    body = json.dumps(
        {"result": [[{"title": "T", "text": "x"}, {"contents": '"U"\ny', "url": "u", "id": 7}]]}
    ).encode()
    with serving(Scripted(body=body)) as url:
        found = client(url).search(["a"], 5)[0]
    assert found == [
        Passage("", "T", '"T"\nx', "doc://", 0.0),
        Passage("7", "U", '"U"\ny', "u", 0.0),
    ]


def test_a_server_that_ignores_topk_is_cut():
    body = json.dumps({"result": [[{"id": str(i), "contents": "x"} for i in range(9)]]}).encode()
    with serving(Scripted(body=body)) as url:
        assert [passage.id for passage in client(url).search(["a"], 2)[0]] == ["0", "1"]


@pytest.mark.parametrize("failures", [[500], [503, 502], [429], [CUT], [429, CUT, 500]])
def test_what_may_pass_is_tried_again(failures):
    server = Scripted(*failures)
    with serving(server) as url:
        assert client(url).search(["a"], 1)[0][0].id == "s/a"
    assert len(server.requests) == len(failures) + 1


@pytest.mark.parametrize("status", [400, 413, 422])
def test_what_another_attempt_would_not_change_is_not_tried_again(status):
    server = Scripted(status)
    with serving(server) as url, pytest.raises(RetrievalError, match=f"status {status}"):
        client(url).search(["a"], 1)
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_query_that_a_server_refuses_which_answers_others_is_the_policys_doing(status):
    with serving(Scripted(status, 200, status)) as url:
        search = client(url)
        with pytest.raises(RetrievalError) as first:  # nothing has shown that any query is answered
            search.search(["a"], 1)
        search.search(["a"], 1)
        with pytest.raises(PolicyError, match=f"status {status}"):
            search.search(["b"], 1)
    assert not isinstance(first.value, PolicyError)


@pytest.mark.parametrize("status", [401, 404, 405])
def test_a_wrong_address_is_a_mistake_of_the_configuration(status):
    server = Scripted(*[status] * 9)
    with serving(server) as url, pytest.raises(ConfigError, match=f"status {status}.*address"):
        client(url).search(["a"], 1)
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    "body",
    [
        b'{"results": []}',
        b'{"result": []}',
        b'{"result": [["text"]]}',
        b'{"result": [[{"id": "1"}]]}',
        *(
            b'{"result": [[{"document": {"contents": "c"}, "score": %s}]]}' % score
            for score in (b'"high"', b"[0.5]", b"9" * 400)
        ),
    ],
)
def test_an_answer_of_another_shape_is_never_taken_for_an_empty_one(body):
    with (
        serving(Scripted(body=body)) as url,
        pytest.raises(RetrievalError, match=r"expected|no 'contents'"),
    ):
        client(url).search(["a"], 1)


@pytest.mark.parametrize("before", [0, 1])
def test_a_stray_answer_of_a_gateway_ends_nothing(before):
    server = Scripted(*[200] * before, 404, 404)
    with serving(server) as url:
        retriever = client(url)
        assert [retriever.search(["a"], 1)[0][0].id for _ in range(2)] == ["s/a"] * 2
    assert len(server.requests) == 4


def test_a_server_that_starts_again_is_waited_for_with_one_line_in_the_log(caplog):
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
    with serving(Scripted(), port) as url:
        retriever = client(url)
        retriever.search(["a"], 1)

    async def many():
        searches = [asyncio.ensure_future(retriever.find(f"q{i}", 1)) for i in range(20)]
        await asyncio.sleep(1.5)
        with serving(server := Scripted(), port):
            return server, await asyncio.gather(*searches)

    with caplog.at_level("INFO", "rlflow_environments"):
        server, found = asyncio.run(many())
    assert [hits[0].id for hits in found] == [f"s/q{i}" for i in range(20)]
    assert len(server.requests) == 20
    lines = [record.message for record in caplog.records]
    assert (
        len(lines) == 2
        and "no retrieval server answers" in lines[0]
        and "answers again" in lines[1]
    )


def test_a_server_that_stays_away_fails_every_search_at_its_deadline():
    with serving(Scripted()) as url:
        retriever = client(url, timeout_s=0.8)

    async def many():
        return await asyncio.gather(
            *(retriever.find(f"q{i}", 1) for i in range(5)), return_exceptions=True
        )

    start = time.monotonic()
    found = asyncio.run(many())
    assert time.monotonic() - start < 4
    assert all(
        isinstance(problem, RetrievalError) and "last: http" in str(problem) for problem in found
    )


def test_tries_counts_all_attempts():
    server = Scripted(*[500] * 9)
    with (
        serving(server) as url,
        pytest.raises(RetrievalError, match=r"after 3 of 3 attempts.*status 500"),
    ):
        client(url, tries=3).search(["a"], 1)
    assert len(server.requests) == 3


def test_each_attempt_has_its_own_timeout_inside_the_deadline():
    server = Scripted(HANG, HANG)
    with serving(server) as url:
        start = time.monotonic()
        assert client(url, attempt_timeout_s=0.4).search(["a"], 1)[0][0].id == "s/a"
        assert time.monotonic() - start >= 0.8
    assert len(server.requests) == 3


def test_the_deadline_ends_everything():
    server = Scripted(*[HANG] * 9)
    with serving(server) as url:
        retriever = client(url, attempt_timeout_s=0.5, timeout_s=1.2, tries=9)
        start = time.monotonic()
        with pytest.raises(RetrievalError, match="in 1"):
            retriever.search(["a"], 1)
        assert time.monotonic() - start < 5
    assert 2 <= len(server.requests) <= 3


def test_it_comes_back_when_the_server_asks_it_to():
    server = Scripted(429, headers=[(b"retry-after", b"1")])
    with serving(server) as url:
        assert client(url).search(["a"], 1)
    assert server.requests[1][0] - server.requests[0][0] >= 1.0


def test_waiting_for_a_connection_counts_against_the_deadline():
    server = Scripted(HANG)
    with serving(server) as url:
        retriever = client(url, connections=1, timeout_s=1.0)

        async def two():
            return await asyncio.gather(
                retriever.find("a", 1), retriever.find("b", 1), return_exceptions=True
            )

        first, second = asyncio.run(two())
    assert isinstance(first, RetrievalError) and isinstance(second, RetrievalError)


def test_many_searches_from_several_loops_are_not_mixed_up():
    with serving(Scripted()) as url:
        retriever = client(url, connections=16)

        async def many(name):
            return await asyncio.gather(*(retriever.find(f"{name}{i}", 1) for i in range(60)))

        for name in "ab":
            assert [hits[0].id for hits in asyncio.run(many(name))] == [
                f"s/{name}{i}" for i in range(60)
            ]


def test_a_closed_client_refuses():
    with serving(Scripted()) as url:
        retriever = client(url)
        retriever.search(["a"], 1)
        retriever.close()
        with pytest.raises(RetrievalError, match="closed"):
            retriever.search(["a"], 1)
        retriever.close()


# ---------------------------------------------------------------- several servers


def test_another_server_takes_over_at_once():
    good, gone = Scripted(name="good"), Scripted(*[CUT] * 99, name="gone")
    with serving(good) as first, serving(gone) as second:
        retriever = client([first, second])
        start = time.monotonic()
        assert {retriever.search([f"q{i}"], 1)[0][0].id for i in range(20)} == {
            f"good/q{i}" for i in range(20)
        }
        assert time.monotonic() - start < 10
    assert 1 <= len(gone.requests) < 15  # it rests, longer each time


def test_stale_discovery_files_are_skipped(tmp_path):
    with bind("127.0.0.1", 0) as unused:
        port = unused.getsockname()[1]
    DiscoveryFile(tmp_path, "127.0.0.1", port).write()  # nobody is there any more
    foreign, server = Scripted(*[404] * 99), Scripted()
    with serving(foreign) as other, serving(server) as url:
        for address in (other, url):
            DiscoveryFile(tmp_path, "127.0.0.1", int(address.rpartition(":")[2])).write()
        retriever = client(None, discovery=tmp_path)
        assert [retriever.search([f"q{i}"], 1)[0][0].id for i in range(10)] == [
            f"s/q{i}" for i in range(10)
        ]


def test_a_server_that_appears_later_is_found(tmp_path):
    first, second = Scripted(name="first"), Scripted(name="second")
    with serving(second) as later:
        with serving(first) as url:
            mine = DiscoveryFile(tmp_path, "127.0.0.1", int(url.rpartition(":")[2]))
            mine.write()
            retriever = client(None, discovery=tmp_path)
            assert retriever.search(["a"], 1)[0][0].id == "first/a"
        DiscoveryFile(tmp_path, "127.0.0.1", int(later.rpartition(":")[2])).write()
        assert retriever.search(["b"], 1)[0][0].id == "second/b"


def test_discovery_files_have_the_fields_name_and_content(tmp_path):
    file = DiscoveryFile(tmp_path / "new", "10.0.0.7", 8000)
    file.write()
    assert (
        file.path.name == "Host10.0.0.7_IP8000.txt" and file.path.read_bytes() == b"10.0.0.7:8000"
    )
    (tmp_path / "new" / "Hostb_IP1.txt").write_text("b:1\n\nc:2\n")
    assert read_addresses(tmp_path / "new") == ["10.0.0.7:8000", "b:1", "c:2"]
    file.remove()
    file.remove()
    assert read_addresses(tmp_path / "new") == ["b:1", "c:2"]
    assert (
        DiscoveryFile(tmp_path, "0.0.0.0", 1).content != "0.0.0.0:1"
    )  # nobody can connect to that
    six = DiscoveryFile(tmp_path / "six", "::1", 8000)
    six.write()
    assert [server_url(one) for one in read_addresses(tmp_path / "six")] == ["http://[::1]:8000"]


def test_a_line_that_is_no_address_is_left_out(tmp_path, caplog):
    (tmp_path / "Hosta_IP1.txt").write_bytes(b"node 7:port\n\xff\xfe1\na:1\n")
    pool = ServerPool(lambda: read_addresses(tmp_path), random.Random(0))
    assert pool.take() == "http://a:1"
    assert "'node 7:port'. It is left out" in caplog.text


def test_a_server_that_left_and_came_back_has_no_negative_load():
    listed = ["a:1", "b:1"]
    pool = ServerPool(lambda: listed, random.Random(0))
    taken = [pool.take() for _ in range(10)]
    for listed in (["b:1"], ["a:1", "b:1"]):  # noqa: B007 -- what the pool is told
        pool.release("http://b:1", failed=True)
        pool.take()
    for url in taken:
        pool.release(url, failed=False)
    assert all(server.in_flight >= 0 for server in pool._servers.values())


def test_searches_that_are_cancelled_say_nothing_of_their_server():
    """As the rollout cancels those of attempts that it no longer needs."""
    server = Scripted(*[HANG] * 4)

    async def cancelled() -> None:
        searches = [asyncio.ensure_future(retriever.find(f"q{number}", 1)) for number in range(4)]
        while len(server.requests) < 4:
            await asyncio.sleep(0.01)
        for search in searches:
            search.cancel()
        await asyncio.gather(*searches, return_exceptions=True)

    with serving(server) as url:
        retriever = client(url)
        asyncio.run(cancelled())
    (seen,) = retriever._pool._servers.values()
    assert (seen.in_flight, seen.failures, seen.rests_until) == (0, 0, 0.0)


def test_the_less_busy_server_is_asked():
    pool = ServerPool(lambda: ["a:1", "b:1"], random.Random(0))
    taken = [pool.take() for _ in range(10)]
    assert sorted(taken) == ["http://a:1"] * 5 + ["http://b:1"] * 5
    assert pool.take(avoid="http://a:1") == "http://b:1"


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("h:1", "http://h:1"),
        ("http://h:1/", "http://h:1"),
        ("http://h:1/retrieve", "http://h:1"),
        ("https://h/base", "https://h/base"),
    ],
)
def test_addresses_are_taken_in_the_forms_of_the_field(address, url):
    assert server_url(address) == url


# ---------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "either urls"),
        ({"url": "h:1", "discovery": "x"}, "either urls"),
        ({"url": "ftp://h:1"}, "http://host:port"),
        ({"url": "h:port"}, "http://host:port"),
        ({"url": "h:1", "trys": 3}, "unknown keyword 'trys'.*Did you mean 'tries'"),
        ({"url": "h:1", "tries": 0}, "tries"),
        ({"url": "h:1", "timeout_s": -1}, "timeout_s"),
        (
            {"url": "h:1", "cache": {"mode": "recrod", "directory": "d"}},
            "expected one of off, record, replay",
        ),
        ({"url": "h:1", "cache": {"mode": "record"}}, "cache.directory"),
        ({"url": "h:1", "cache": {"dir": "record"}}, "unknown keyword 'dir'"),
    ],
)
def test_mistakes_are_named(options, named):
    with pytest.raises(ConfigError, match=named):
        make_retriever({"name": "http", **options}, None)


def test_a_server_that_does_not_come_is_a_mistake_of_the_configuration():
    with bind("127.0.0.1", 0) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(
        ConfigError, match=f"no server is ready after 0.5 s .127.0.0.1:{port}.*no connection to"
    ):
        HttpRetriever(f"127.0.0.1:{port}", wait_s=0.5)
