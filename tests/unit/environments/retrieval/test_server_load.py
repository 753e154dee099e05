"""Claims about the retrieval server under load: batches, limits, deadlines, its cache."""

from __future__ import annotations

import asyncio
import socket
import threading

import httpx
import pytest

from rlflow_environments.retrieval.server.addresses import bind
from rlflow_environments.retrieval.server.index import AnswerCache, ServedIndex
from tests.unit.environments.retrieval.search_echo import (
    Echo,
    client,
    echo_server,
    get,
    post,
    reload,
)
from tests.unit.environments.retrieval.search_servers import search_server


def concurrently(
    url: str, bodies: list[dict], headers: dict | None = None, opened=None, after: int = 0
) -> list[httpx.Response]:
    """The answers to requests that are sent at the same time. opened: an event to set once `after` of them are answered."""

    async def scenario():
        async with httpx.AsyncClient(
            timeout=60, limits=httpx.Limits(max_connections=None), headers=headers
        ) as client:
            tasks = [
                asyncio.create_task(client.post(url + "/retrieve", json=body)) for body in bodies
            ]
            while opened is not None and not opened.is_set():
                await asyncio.sleep(0.02)
                if sum(task.done() for task in tasks) >= after:
                    opened.set()
            return await asyncio.gather(*tasks)

    return asyncio.run(scenario())


def test_concurrent_requests_share_batches_and_nothing_else():
    retriever = Echo()
    with echo_server(retriever) as (url, _):
        bodies = [
            {"queries": [f"q{i}", f"r{i % 3}"], "topk": 1 + i % 4, "return_scores": i % 2 == 0}
            for i in range(60)
        ]
        responses = concurrently(url, bodies)
    for body, response in zip(bodies, responses, strict=True):
        hits = response.json()["result"]
        documents = [
            [e["document"] if body["return_scores"] else e for e in hits_of_query]
            for hits_of_query in hits
        ]
        expected = [
            [f"{query}/{rank}" for rank in range(body["topk"])] for query in body["queries"]
        ]
        assert [
            [document["id"] for document in hits_of_query] for hits_of_query in documents
        ] == expected
    assert len(retriever.batches) < 60


def test_equal_queries_under_way_are_searched_once():
    async def scenario():
        retriever = Echo()
        retriever.open.clear()
        index = ServedIndex(retriever, cache_bytes=0)
        tasks = [asyncio.create_task(index.answer(["same", "same"], 3)) for _ in range(20)]
        await asyncio.to_thread(retriever.started.wait, 20)
        retriever.open.set()
        return retriever.batches, await asyncio.gather(*tasks)

    batches, answers = asyncio.run(scenario())
    assert batches == [(["same"], 3)]
    assert sum(answer.shared for answer in answers) == 39
    assert all(
        len(hits) == 3 and hits == answers[0].results[0]
        for answer in answers
        for hits in answer.results
    )


def test_overdue_requests_are_looked_for_by_one_timer(monkeypatch):
    async def scenario() -> int:
        index, looks = ServedIndex(Echo(), cache_bytes=0), []
        look = index._look
        monkeypatch.setattr(index, "_look", lambda loop: (looks.append(1), look(loop)))
        loop = asyncio.get_running_loop()
        waiting = [loop.create_future()]
        for number in range(20):  # each finds nothing under way
            await index.answer([f"q{number}"], 1)
        index._due[waiting[0]] = float("inf")  # one that stays
        await asyncio.sleep(0.35)
        return len(looks)

    assert asyncio.run(scenario()) <= 4


def test_a_failing_query_is_an_error_of_its_own_request_only():
    with echo_server() as (url, _):
        good, bad, other = concurrently(url, [{"query": "a"}, {"query": "bad"}, {"query": "b"}])
        assert (good.status_code, bad.status_code, other.status_code) == (200, 500, 200)
        assert "the index is gone" in bad.json()["detail"]


def test_a_full_queue_answers_429_with_the_time_to_come_back():
    retriever = Echo()
    retriever.open.clear()
    with echo_server(retriever, max_waiting=10, max_batch=1) as (url, _):
        bodies = [{"query": f"q{i}"} for i in range(40)]
        responses = concurrently(
            url, bodies, opened=retriever.open, after=29
        )  # one is searched, ten wait
        refused = [response for response in responses if response.status_code == 429]
        assert 10 <= 40 - len(refused) <= 11 and all(
            int(response.headers["retry-after"]) >= 1 for response in refused
        )
        assert all(response.status_code == 200 for response in responses if response not in refused)


def test_nothing_is_searched_for_a_client_whose_deadline_is_over():
    retriever = Echo()
    retriever.open.clear()
    with echo_server(retriever) as (url, _):
        responses = concurrently(
            url, [{"query": "first"}, {"query": "late"}], headers={"X-Deadline-S": "0.3"}
        )
        assert [response.status_code for response in responses] == [503, 503]
        retriever.open.set()
        assert post(url, query="next").status_code == 200
    assert [queries for queries, _ in retriever.batches if queries != ["next"]] in (
        [["first"]],
        [["late"]],
    )


def test_a_client_that_goes_away_costs_nobody_else_anything():
    retriever = Echo()
    retriever.open.clear()
    with echo_server(retriever) as (url, _):
        with pytest.raises(httpx.ReadTimeout):
            client().post(url + "/retrieve", json={"query": "impatient"}, timeout=0.3)
        threading.Timer(0.2, retriever.open.set).start()
        assert [
            response.status_code
            for response in concurrently(url, [{"query": f"q{i}"} for i in range(10)])
        ] == [200] * 10


def test_the_cache_answers_equal_queries_until_the_index_is_exchanged():
    found = iter([Echo(), Echo()])
    used: list[Echo] = []

    def load(changes, report, on_batch):
        used.append(next(found))
        return ServedIndex(used[-1])

    with search_server(load) as (url, service):
        first = [post(url, query="same").text for _ in range(3)]
        assert reload(url, service).status_code == 200
        assert post(url, query="same").text == first[0] == first[1] == first[2]
        counted = get(url + "/metrics").text
        assert "cache_hits_total 2.0" in counted and "queries_total 4.0" in counted
    assert [len(retriever.batches) for retriever in used] == [1, 1]


def test_the_cache_keeps_the_latest_answers_within_its_bytes():
    cache = AnswerCache(3000)
    for name in "abc":
        cache.put((name, 1), [(b"x" * 500, 1.0)])
    assert cache.get(("a", 1)) is not None  # now the latest
    cache.put(("d", 1), [(b"x" * 500, 1.0)])
    assert [name for name in "abcd" if cache.get((name, 1))] == ["a", "c", "d"]
    off = AnswerCache(0)
    off.put(("a", 1), [])
    assert off.get(("a", 1)) is None


def test_answers_leave_at_once():
    """Nagle's algorithm is off on the connections of our socket: else every answer waits for a delayed acknowledgement, 40 ms."""

    async def option() -> int:
        accepted: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()
        listener = bind("127.0.0.1", 0)
        async with await asyncio.start_server(
            lambda _, writer: accepted.set_result(writer), sock=listener
        ):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            ours = await accepted
            value = ours.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            for one in (writer, ours):
                one.close()
            return value

    assert asyncio.run(option()) != 0
