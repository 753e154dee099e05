"""Claims about what the client remembers, and about what the environment makes of its failures."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from rlflow.environment import Task
from rlflow.errors import ConfigError, DataError
from rlflow.models.calls.reader import CallReader
from rlflow_environments.retrieval.client.asynchronous import trace_id
from rlflow_environments.retrieval.client.cache import SearchCache
from rlflow_environments.retrieval.client.client import HttpRetriever
from rlflow_environments.retrieval.errors import ReplayMissError, RetrievalError
from rlflow_environments.retrieval.indices import make_retriever
from rlflow_environments.search import SearchEnvironment
from tests.unit.environments.retrieval.scripted_server import Scripted, client
from tests.unit.environments.retrieval.search_servers import serving

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
    replay = make_retriever(
        {"name": "http", "cache": {"directory": str(tmp_path), "mode": "strict-replay"}}, None
    )
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
        assert [hits[0].id for hits in replay.search(["a", "new", "b"], 2)] == [
            "s/a",
            "s/new",
            "s/b",
        ]
        assert server.requests[-1][1]["queries"] == ["new"]
        replay.search(["new"], 2)
        assert len(server.requests) == 3


def test_replay_waits_for_a_server_that_loads_but_no_longer_than_a_search(tmp_path):
    with serving(Scripted()) as url:
        recorded(url, tmp_path)
    replaying = {"cache": {"directory": str(tmp_path), "mode": "replay"}}
    with serving(Scripted(loading=2)) as url:
        assert client(url, **replaying).search(["new"], 2)[0][0].id == "s/new"
    with (
        serving(Scripted(loading=999)) as url,
        pytest.raises(RetrievalError, match="search failed"),
    ):
        client(url, **replaying, timeout_s=0.3).search(["newer"], 2)


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
    first, second = (
        {
            str(path.relative_to(tmp_path / name)): path.read_bytes()
            for path in sorted((tmp_path / name).rglob("*.json"))
        }
        for name in ("one", "two")
    )
    assert first == second and len(first) == 4


def test_records_of_another_index_are_refused(tmp_path):
    with serving(Scripted(identity="index-1")) as url:
        recorded(url, tmp_path)
    with serving(Scripted(identity="index-2")) as url:
        with pytest.raises(
            ConfigError, match="recorded from the index index-1, the server has index-2"
        ):
            client(url, cache={"directory": str(tmp_path), "mode": "replay"}).search(["new"], 2)


def test_an_index_that_changes_behind_the_address_is_found_by_its_answers(tmp_path):
    server = Scripted(identity="index-1", headers=[(b"x-index", b"index-1")])
    with serving(server) as url:
        retriever = recorded(url, tmp_path, "a")
        server.headers = [(b"x-index", b"index-2")]
        with pytest.raises(
            ConfigError, match="recorded from the index index-1, the server has index-2"
        ):
            retriever.search(["b"], 2)
    assert len(list(tmp_path.glob("??/*.json"))) == 1


def test_replay_answers_nothing_in_place_of_another_index(tmp_path):
    with serving(Scripted(identity="index-1")) as url:
        recorded(url, tmp_path)
    replaying = {"cache": {"directory": str(tmp_path), "mode": "replay"}}
    with (
        serving(Scripted(identity="index-2")) as url,
        pytest.raises(ConfigError, match="the server has index-2"),
    ):
        client(url, **replaying).search(["a"], 2)
    assert client("http://127.0.0.1:9", **replaying).search(["a"], 2)[0][0].id == "s/a"


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
    from rlflow.net.calls import CallThreads
    from rlflow.rollout.engine import Completion
    from rlflow.rollout.episodes import Attempt, EpisodeLimits, EpisodePlayer

    class Bytes:
        eos_ids = (0,)
        call_reader = CallReader()

        def encode(self, text):
            return list(text.encode())

        def encode_prompt(self, prompt, chat):
            return self.encode(prompt)

        def decode(self, tokens):
            return bytes(tokens).decode()

        response_text = decode

    async def generate(tokens, sampling, request):
        response = list(b"<search>x</search>")
        return Completion(response, [0.0] * len(response), [0] * len(response), "stop")

    server = Scripted(500, 500)
    with serving(server) as url:
        limits = EpisodeLimits(3, 100, 1000, None, 1.0, False)
        player = EpisodePlayer(environment(url), Bytes(), limits, CallThreads(1, "test"))
        attempt = Attempt(Task("t", "Question?", ["x"]), "g", "r", lambda turn: turn)
        trajectory = asyncio.run(player.play(attempt, generate))
    assert trajectory.stop.name == "ABORTED" and "RetrievalError" in trajectory.error
    assert "status 500" not in "".join(
        bytes(segment.tokens.tolist()).decode() for segment in trajectory.segments
    )
    assert not trajectory.usable and len(server.requests) == 2
