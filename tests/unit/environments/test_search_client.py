"""Claims about the client: which failures it survives, how long it tries, and what it remembers."""

from __future__ import annotations

import asyncio
import json
import random
import time

import pytest

from rlflow.environment import Task
from rlflow.errors import ConfigError, DataError
from rlflow_environments.search import SearchEnvironment
from rlflow_environments.search.cache import SearchCache
from rlflow_environments.search.client import HttpRetriever
from rlflow_environments.search.errors import ReplayMissError, RetrievalError
from rlflow_environments.search.formats import Passage
from rlflow_environments.search.retrievers import make_retriever
from rlflow_environments.search.server.discovery import DiscoveryFile, read_addresses
from rlflow_environments.search.server.listener import bind
from rlflow_environments.search.servers import ServerPool, server_url
from rlflow_environments.search.trace import trace_id
from tests.unit.environments.search_servers import serving

OK = 200
HANG = "hang"
CUT = "cut"  # closes the connection in the middle of the answer


class Scripted:
    """A server whose n-th search is answered as told; afterwards with passages that name the query and the server."""

    def __init__(self, *script, name="s", headers=(), identity="index-1", body=b"") -> None:
        self.script = list(script)
        self.name, self.headers, self.identity, self.body = name, list(headers), identity, body
        self.requests: list[tuple[float, dict, dict]] = []

    async def __call__(self, scope, receive, send) -> None:
        body = (await receive()).get("body", b"")
        if scope["path"] == "/ready":
            await self._send(send, OK, b"{}")
        elif scope["path"] == "/info":
            await self._send(send, OK if self.identity else 404, json.dumps({"identity": self.identity}).encode())
        else:
            headers = {key.decode(): value.decode() for key, value in scope["headers"]}
            self.requests.append((time.monotonic(), json.loads(body), headers))
            await self._search(send, json.loads(body), self.script.pop(0) if self.script else OK)

    async def _search(self, send, request, step) -> None:
        if step == HANG:
            await asyncio.sleep(30)
        result = [
            [{"document": {"id": f"{self.name}/{query}", "contents": f'"{query}"\ntext'}, "score": 0.5}] * request["topk"]
            for query in request["queries"]
        ]
        body = self.body or json.dumps({"result": result}).encode()
        if step == CUT:
            await self._send(send, OK, body, missing=10)
        else:
            await self._send(send, step, body, self.headers)

    async def _send(self, send, status, body, headers=(), missing=0) -> None:
        headers = [(b"content-length", str(len(body) + missing).encode()), *headers]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def client(urls, **options) -> HttpRetriever:
    return HttpRetriever(urls, **{"timeout_s": 20.0, "attempt_timeout_s": 5.0, **options})


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
    body = json.dumps({"result": [[{"title": "T", "text": "x"}, {"contents": '"U"\ny', "url": "u", "id": 7}]]}).encode()
    with serving(Scripted(body=body)) as url:
        found = client(url).search(["a"], 5)[0]
    assert found == [Passage("", "T", '"T"\nx', "doc://", 0.0), Passage("7", "U", '"U"\ny', "u", 0.0)]


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
def test_what_another_attempt_would_not_mend_is_not_tried_again(status):
    server = Scripted(status)
    with serving(server) as url, pytest.raises(RetrievalError, match=f"status {status}"):
        client(url).search(["a"], 1)
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [401, 404, 405])
def test_a_wrong_address_is_a_mistake_of_the_configuration(status):
    server = Scripted(status)
    with serving(server) as url, pytest.raises(ConfigError, match=f"status {status}.*address"):
        client(url).search(["a"], 1)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "body", [b'{"results": []}', b'{"result": []}', b'{"result": [["text"]]}', b'{"result": [[{"id": "1"}]]}']
)
def test_an_answer_of_another_shape_is_never_taken_for_an_empty_one(body):
    with serving(Scripted(body=body)) as url, pytest.raises(RetrievalError, match=r"expected|no 'contents'"):
        client(url).search(["a"], 1)


def test_tries_counts_all_attempts():
    server = Scripted(*[500] * 9)
    with serving(server) as url, pytest.raises(RetrievalError, match=r"after 3 of 3 attempts.*status 500"):
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
            return await asyncio.gather(retriever.find("a", 1), retriever.find("b", 1), return_exceptions=True)

        first, second = asyncio.run(two())
    assert isinstance(first, RetrievalError) and isinstance(second, RetrievalError)


def test_many_searches_from_several_loops_are_not_mixed_up():
    with serving(Scripted()) as url:
        retriever = client(url, connections=16)

        async def many(name):
            return await asyncio.gather(*(retriever.find(f"{name}{i}", 1) for i in range(60)))

        for name in "ab":
            assert [hits[0].id for hits in asyncio.run(many(name))] == [f"s/{name}{i}" for i in range(60)]


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
        assert {retriever.search([f"q{i}"], 1)[0][0].id for i in range(20)} == {f"good/q{i}" for i in range(20)}
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
        assert [retriever.search([f"q{i}"], 1)[0][0].id for i in range(10)] == [f"s/q{i}" for i in range(10)]


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
    assert file.path.name == "Host10.0.0.7_IP8000.txt" and file.path.read_bytes() == b"10.0.0.7:8000"
    (tmp_path / "new" / "Hostb_IP1.txt").write_text("b:1\n\nc:2\n")
    assert read_addresses(tmp_path / "new") == ["10.0.0.7:8000", "b:1", "c:2"]
    file.remove()
    file.remove()
    assert read_addresses(tmp_path / "new") == ["b:1", "c:2"]
    assert DiscoveryFile(tmp_path, "0.0.0.0", 1).content != "0.0.0.0:1"  # nobody can connect to that


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
        ({"url": "h:1", "trys": 3}, "unknown option 'trys'.*Did you mean 'tries'"),
        ({"url": "h:1", "tries": 0}, "tries"),
        ({"url": "h:1", "timeout_s": -1}, "timeout_s"),
        ({"url": "h:1", "cache": {"mode": "recrod", "directory": "d"}}, "Did you mean 'record'"),
        ({"url": "h:1", "cache": {"mode": "record"}}, "cache.directory"),
        ({"url": "h:1", "cache": {"dir": "record"}}, "unknown option 'dir'"),
    ],
)
def test_mistakes_are_named(options, named):
    with pytest.raises(ConfigError, match=named):
        make_retriever({"name": "http", **options}, None)


def test_a_server_that_does_not_come_is_a_mistake_of_the_configuration():
    with bind("127.0.0.1", 0) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(ConfigError, match=f"no server is ready after 0.5 s .127.0.0.1:{port}.*ClientConnector"):
        HttpRetriever(f"127.0.0.1:{port}", wait_s=0.5)


# ---------------------------------------------------------------- the cache


def recorded(url: str, folder, queries=("a", "b"), **options) -> HttpRetriever:
    retriever = client(url, cache={"directory": str(folder), "mode": "record"}, **options)
    for query in queries:
        retriever.search([query], 2)
    return retriever


def test_strict_replay_needs_no_server_and_gives_what_was_recorded(tmp_path):
    server = Scripted()
    with serving(server) as url:
        expected = recorded(url, tmp_path).search(["a", "b"], 2)
    replay = make_retriever({"name": "http", "cache": {"directory": str(tmp_path), "mode": "strict-replay"}}, None)
    assert replay.search(["a", "b"], 2) == expected
    assert asyncio.run(replay.find("b", 2)) == expected[1]
    with pytest.raises(ReplayMissError, match=r"'never asked' with top_k 2 was not recorded"):
        replay.search(["never asked"], 2)
    with pytest.raises(ReplayMissError, match="'a' with top_k 3"):
        replay.search(["a"], 3)


def test_replay_asks_the_server_for_what_is_missing_only(tmp_path):
    server = Scripted()
    with serving(server) as url:
        recorded(url, tmp_path)
        replay = client(url, cache={"directory": str(tmp_path), "mode": "replay"})
        assert [hits[0].id for hits in replay.search(["a", "new", "b"], 2)] == ["s/a", "s/new", "s/b"]
        assert server.requests[-1][1]["queries"] == ["new"]
        replay.search(["new"], 2)
        assert len(server.requests) == 3


def test_record_asks_every_time(tmp_path):
    server = Scripted()
    with serving(server) as url:
        recorded(url, tmp_path, "aaa")
    assert len(server.requests) == 3


def test_equal_runs_write_equal_bytes_in_any_order(tmp_path):
    with serving(Scripted()) as url:
        for name, queries in (("one", ["a", "\ud83d", "c"]), ("two", ["c", "a", "\ud83d", "a"])):
            recorded(url, tmp_path / name, queries)
            time.sleep(0.01)
    one, two = (
        {str(path.relative_to(tmp_path / name)): path.read_bytes() for path in sorted((tmp_path / name).rglob("*.json"))}
        for name in ("one", "two")
    )
    assert one == two and len(one) == 4
    assert SearchCache(tmp_path / "one", "replay").digest() == SearchCache(tmp_path / "two", "replay").digest()


def test_records_of_another_index_are_refused(tmp_path):
    with serving(Scripted(identity="index-1")) as url:
        recorded(url, tmp_path)
    with serving(Scripted(identity="index-2")) as url:
        with pytest.raises(ConfigError, match="recorded from the index index-1, the server has index-2"):
            client(url, cache={"directory": str(tmp_path), "mode": "replay"}).search(["new"], 2)


def test_a_server_that_does_not_tell_its_index_needs_a_name_for_it(tmp_path):
    with serving(Scripted(identity=None)) as url:
        with pytest.raises(ConfigError, match="identity: my-index"):
            recorded(url, tmp_path)
        recorded(url, tmp_path, identity="wiki-18")
    assert json.loads((tmp_path / "source.json").read_text()) == {"identity": "wiki-18"}


def test_damaged_records_and_empty_folders_are_named(tmp_path):
    with pytest.raises(ConfigError, match="holds no recorded searches"):
        SearchCache(tmp_path, "strict-replay")
    with serving(Scripted()) as url:
        recorded(url, tmp_path, "a")
    record = next(tmp_path.glob("??/*.json"))
    record.write_bytes(record.read_bytes()[:-20])
    with pytest.raises(DataError, match="not a recorded search"):
        SearchCache(tmp_path, "strict-replay").get("a", 2)


# ---------------------------------------------------------------- in the environment


def environment(url: str) -> SearchEnvironment:
    return SearchEnvironment(retriever={"name": "http", "url": url, "tries": 2}, top_k=1)


def play(env: SearchEnvironment, *responses: str):
    async def scenario():
        episode = await env.reset(Task("t1", "Question?", ["x"]))
        return [await env.step(episode, response) for response in responses]

    return asyncio.run(scenario())


def test_the_trace_in_the_servers_log_follows_from_the_trajectory():
    server = Scripted()
    responses = ["thinking <search> one </search>", "more <search>two</search>"]
    with serving(server) as url:
        steps = play(environment(url), *responses)
    assert "two" in steps[1].observation
    traces = [headers["x-trace-id"] for _, _, headers in server.requests]
    assert traces == [trace_id("t1", responses[:1]), trace_id("t1", responses)]


def test_a_failure_aborts_the_episode_and_its_text_reaches_nobody():
    from concurrent.futures import ThreadPoolExecutor

    from rlflow.rollout.engine import Completion
    from rlflow.rollout.episodes import Attempt, EpisodePlayer, Limits

    class Bytes:
        eos_ids = (0,)

        def encode(self, text):
            return list(text.encode())

        def encode_prompt(self, prompt, chat):
            return self.encode(prompt)

        def decode(self, tokens):
            return bytes(tokens).decode()

    async def generate(tokens, sampling, request):
        response = list(b"<search>x</search>")
        return Completion(response, [0.0] * len(response), [0] * len(response), "stop")

    server = Scripted(500, 500)
    with serving(server) as url, ThreadPoolExecutor(1) as threads:
        limits = Limits(3, 100, 1000, None, 1.0, False)
        player = EpisodePlayer(environment(url), Bytes(), limits, threads)
        attempt = Attempt(Task("t", "Question?", ["x"]), "g", "r", lambda turn: turn)
        trajectory = asyncio.run(player.play(attempt, generate))
    assert trajectory.stop.name == "ABORTED" and "RetrievalError" in trajectory.error
    assert "status 500" not in "".join(bytes(segment.tokens.tolist()).decode() for segment in trajectory.segments)
    assert not trajectory.usable and len(server.requests) == 2
