"""Claims about coalesced searches: batches form, and no request sees another."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlflow_environments.retrieval.coalescer import CoalescedSearch
from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.retrieval.errors import QueueFullError
from rlflow_environments.retrieval.indices import Retriever


class Echo(Retriever):
    """Answers a query with top_k passages that name it; fails on "bad"; its first batch waits for `open`."""

    def __init__(self, gated: bool = False) -> None:
        self.batches: list[tuple[list[str], int]] = []
        self.started = threading.Event()
        self.open = threading.Event()
        if not gated:
            self.open.set()

    def search(self, queries, top_k):
        self.batches.append((list(queries), top_k))
        self.started.set()
        if not self.open.wait(10):
            raise TimeoutError("nobody opened the gate")
        if "bad" in queries:
            raise OSError("the index is gone")
        return [
            [Passage(f"{query}/{rank}", query, query, "") for rank in range(top_k)]
            for query in queries
        ]


def _expected(query: str, top_k: int) -> list[str]:
    return [f"{query}/{rank}" for rank in range(top_k)]


async def _gated(retriever: Echo, requests: list[tuple[str, int]], **options) -> list:
    """What the requests get that arrive while the retriever is busy with an earlier one."""
    search = CoalescedSearch(retriever, **options)
    first = asyncio.create_task(search.search("first", 1))
    await asyncio.to_thread(retriever.started.wait, 10)
    tasks = [asyncio.create_task(search.search(query, top_k)) for query, top_k in requests]
    await asyncio.sleep(0)  # every task has put its request in
    retriever.open.set()
    results = await asyncio.gather(first, *tasks, return_exceptions=True)
    return results[1:]


def test_requests_that_wait_are_searched_in_one_batch():
    retriever = Echo(gated=True)
    requests = [(f"q{i}", 3) for i in range(50)]
    results = asyncio.run(_gated(retriever, requests))
    assert [[p.id for p in hits] for hits in results] == [
        _expected(*request) for request in requests
    ]
    assert retriever.batches == [(["first"], 1), ([f"q{i}" for i in range(50)], 3)]


def test_a_request_gets_its_own_top_k_whatever_is_in_flight():
    retriever = Echo(gated=True)
    requests = [(f"q{i}", 1 + i % 5) for i in range(40)]
    results = asyncio.run(_gated(retriever, requests))
    assert [[p.id for p in hits] for hits in results] == [
        _expected(*request) for request in requests
    ]


def test_a_failing_query_fails_alone():
    retriever = Echo(gated=True)
    results = asyncio.run(_gated(retriever, [("q0", 2), ("bad", 2), ("q1", 2)]))
    assert [p.id for p in results[0]] == _expected("q0", 2) and [
        p.id for p in results[2]
    ] == _expected("q1", 2)
    assert isinstance(results[1], OSError)


def test_equal_queries_are_searched_once_and_answered_apart():
    retriever = Echo(gated=True)
    first, other = asyncio.run(_gated(retriever, [("same", 2), ("same", 2)]))
    assert retriever.batches[1] == (["same"], 2)
    first.clear()
    assert [p.id for p in other] == _expected("same", 2)


def test_a_batch_is_never_larger_than_allowed():
    retriever = Echo(gated=True)
    results = asyncio.run(_gated(retriever, [(f"q{i}", 1) for i in range(20)], max_batch=8))
    assert len(results) == 20
    assert [len(queries) for queries, _ in retriever.batches] == [1, 8, 8, 4]


def test_a_caller_that_goes_away_leaves_the_others_alone():
    async def scenario():
        retriever = Echo(gated=True)
        search = CoalescedSearch(retriever)
        first = asyncio.create_task(search.search("first", 1))
        await asyncio.to_thread(retriever.started.wait, 10)
        leaving, staying = (
            asyncio.create_task(search.search(query, 1)) for query in ("leaving", "staying")
        )
        await asyncio.sleep(0)
        leaving.cancel()
        first.cancel()  # its search is running already
        await asyncio.sleep(0)
        retriever.open.set()
        return retriever.batches, await staying

    batches, hits = asyncio.run(scenario())
    assert batches == [(["first"], 1), (["staying"], 1)]
    assert [p.id for p in hits] == _expected("staying", 1)


def test_event_loops_in_several_threads_share_it():
    search = CoalescedSearch(Echo())

    async def many(name: str):
        return await asyncio.gather(*(search.search(f"{name}{i}", 2) for i in range(30)))

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda name: asyncio.run(many(name)), "abcd"))
    for name, found in zip("abcd", results):
        assert [[p.id for p in hits] for hits in found] == [
            _expected(f"{name}{i}", 2) for i in range(30)
        ]


def test_an_error_reaches_its_caller_as_it_was():
    with pytest.raises(OSError, match="the index is gone"):
        asyncio.run(CoalescedSearch(Echo()).search("bad", 1))


def test_mixed_top_k_still_makes_large_batches_and_none_starves():
    retriever = Echo(gated=True)
    results = asyncio.run(_gated(retriever, [(f"q{i}", 1 + i % 2) for i in range(40)]))
    assert [len(hits) for hits in results] == [1 + i % 2 for i in range(40)]
    assert [len(queries) for queries, _ in retriever.batches] == [1, 20, 20]


def test_an_equal_search_under_way_is_joined():
    async def scenario():
        retriever = Echo(gated=True)
        search = CoalescedSearch(retriever)
        first = search.submit(["same"], 2)
        await asyncio.to_thread(retriever.started.wait, 10)
        second = search.submit(["same", "other"], 2)
        retriever.open.set()
        return retriever.batches, first.shared, second.shared, await first.done, await second.done

    batches, alone, joined, first, second = asyncio.run(scenario())
    assert (alone, joined) == (0, 1)
    assert batches == [(["same"], 2), (["other"], 2)]
    assert first[0] == second[0] and first[0] is not second[0]


def test_a_full_queue_refuses_a_request_whole_and_takes_a_larger_one_when_empty():
    async def scenario():
        retriever = Echo(gated=True)
        search = CoalescedSearch(retriever, max_waiting=3)
        calls = [search.submit(["first"], 1)]
        await asyncio.to_thread(retriever.started.wait, 10)
        calls.append(search.submit(["a", "b"], 1))
        with pytest.raises(
            QueueFullError, match=r"2 searches are waiting and 2 more would pass the limit of 3"
        ):
            search.submit(["c", "d"], 1)
        calls.append(search.submit(["a", "c"], 1))  # one of them is waiting already
        assert search.waiting == 3
        retriever.open.set()
        results = [await call.done for call in calls]
        large = await search.submit([f"q{i}" for i in range(50)], 1).done
        return retriever.batches, results, large, search.waiting

    batches, results, large, waiting = asyncio.run(scenario())
    assert batches[:2] == [(["first"], 1), (["a", "b", "c"], 1)]
    assert [[hits[0].title for hits in result] for result in results] == [
        ["first"],
        ["a", "b"],
        ["a", "c"],
    ]
    assert len(large) == 50 and waiting == 0


def test_short_searches_are_made_by_the_event_loop_and_long_ones_beside_it():
    threads: list[str] = []
    pause_s = 0.0

    class Timed:
        def search(self, queries, top_k):
            threads.append(threading.current_thread().name)
            time.sleep(pause_s)
            return [[f"{query}/{top_k}"] for query in queries]

    async def ask(search, count):
        return [await search.search(f"q{i}", 1) for i in range(count)]

    async def scenario():
        nonlocal pause_s
        search = CoalescedSearch(
            Timed(), here_s=0.2
        )  # which a busy machine does not take for nothing
        assert await ask(search, 10) == [[f"q{i}/1"] for i in range(10)]
        here = threading.current_thread().name
        assert threads[0] != here and threads[-1] == here
        together = await asyncio.gather(*(search.search(f"r{i}", 1) for i in range(40)))
        assert (
            together == [[f"r{i}/1"] for i in range(40)] and threads[10:] == [here] * 3
        )  # 16 at a time
        pause_s = 0.25
        await ask(search, 6)
        assert threads[-1] != here

    asyncio.run(scenario())


def test_a_small_request_waits_for_a_turn_of_greedy_ones_and_not_for_a_full_batch():
    class Slow(Echo):
        def search(self, queries, top_k):
            time.sleep(0.01)  # longer than a client takes to ask again
            return super().search(queries, top_k)

    async def scenario(retriever):
        """The sizes of the batches that each search of a small client waits for, its own included, beside three of 400."""
        search = CoalescedSearch(retriever, max_batch=256)
        calls = [search.submit(["first"], 1)]
        await asyncio.to_thread(retriever.started.wait, 10)
        calls += [search.submit([f"{name}{i}" for i in range(400)], 1) for name in "abc"]
        waited = []
        for number in range(10):
            before = len(retriever.batches)
            call = search.submit([f"small{number}"], 1)
            retriever.open.set()
            await call.done
            batches = [queries for queries, _ in retriever.batches[before:]]
            own = next(
                place for place, queries in enumerate(batches) if f"small{number}" in queries
            )
            waited.append([len(queries) for queries in batches[: own + 1]])
        await asyncio.gather(*(call.done for call in calls))
        return waited

    waited = asyncio.run(scenario(Slow(gated=True)))
    assert all(len(sizes) <= 3 and max(sizes) <= 3 * 8 + 1 for sizes in waited), waited


def test_a_client_with_many_small_requests_does_not_put_off_another():
    async def scenario():
        """Where the other client's search stands among 1,000 that came before it, and in which order those were searched."""
        retriever = Echo(gated=True)
        search = CoalescedSearch(retriever, max_batch=64)
        calls = [search.submit(["first"], 1, "10.0.0.1")]
        await asyncio.to_thread(retriever.started.wait, 10)
        calls += [search.submit([f"{i}"], 1, "10.0.0.1") for i in range(1000)]
        calls.append(search.submit(["mine"], 1, "10.0.0.2"))
        retriever.open.set()
        await asyncio.gather(*(call.done for call in calls))
        order = [query for queries, _ in retriever.batches[1:] for query in queries]
        return order.index("mine"), [query for query in order if query != "mine"]

    place, others = asyncio.run(scenario())
    assert place <= 64, "it waits for one batch of the other's"
    assert others == [f"{i}" for i in range(1000)], "a client's own are searched as they came"


def test_greedy_requests_alone_fill_their_batches():
    async def scenario():
        retriever = Echo(gated=True)
        search = CoalescedSearch(retriever, max_batch=64)
        calls = [search.submit([f"first{i}" for i in range(9)], 1)]
        await asyncio.to_thread(retriever.started.wait, 10)
        calls += [search.submit([f"{name}{i}" for i in range(64)], 1) for name in "ab"]
        retriever.open.set()
        await asyncio.gather(*(call.done for call in calls))
        return [len(queries) for queries, _ in retriever.batches]

    assert asyncio.run(scenario()) == [9, 64, 64]


def test_a_queue_that_large_requests_fill_takes_a_small_one():
    async def scenario(retriever):
        search = CoalescedSearch(retriever, max_waiting=100)
        calls = [search.submit(["first"], 1)]
        await asyncio.to_thread(retriever.started.wait, 10)
        calls.append(search.submit([f"a{i}" for i in range(100)], 1))
        with pytest.raises(
            QueueFullError, match="96 searches are waiting and 90 more"
        ):  # 12 turns of 8
            search.submit([f"b{i}" for i in range(90)], 1)
        # With 8 of the large one, as many as may wait.
        calls += [search.submit([f"small{i}"], 1, f"client {i}") for i in range(92)]
        with pytest.raises(QueueFullError, match="100 searches are waiting and 1 more"):
            search.submit(["one more"], 1, "another")
        retriever.open.set()
        return [len(await call.done) for call in calls], search.waiting

    retriever = Echo(gated=True)
    try:
        assert asyncio.run(scenario(retriever)) == ([1, 100, *[1] * 92], 0)
    finally:
        retriever.open.set()
