"""Claims about disturbances: seeded, alike for a group, off in evaluation; and about the rates that are reported."""

from __future__ import annotations

import asyncio
import time

import pytest

from rlflow.errors import ConfigError
from rlflow_environments.retrieval.corpus import Passage, write_rows
from rlflow_environments.search import SearchEnvironment
from rlflow_environments.search.disturbances import Disturbances
from tests.unit.environments.search.search_agents import Shelf, converse

QUESTIONS = [f"about noise{number}" for number in range(5)]


async def _find(query: str, top_k: int) -> list[Passage]:
    return [Passage(f"{query}/{rank}", query, f'"{query}"\ntext', f"doc://{query}/{rank}") for rank in range(top_k)]


def _search(disturbances: Disturbances, query: str = "q", task: str = "t", before: int = 0, top_k: int = 3):
    coroutine = disturbances.search(_find, query, top_k, task_id=task, asked_before=before, others=QUESTIONS)
    passages, changed = asyncio.run(coroutine)
    return [passage.id for passage in passages], changed


def test_nothing_is_disturbed_by_default():
    assert _search(Disturbances()) == (["q/0", "q/1", "q/2"], False)


def test_equal_searches_of_a_group_are_disturbed_alike_and_others_are_not():
    disturbances = Disturbances(drop=0.5)
    dropped = [_search(disturbances, f"q{number}")[0] == [] for number in range(400)]
    assert dropped == [_search(disturbances, f"q{number}")[0] == [] for number in range(400)]
    assert 150 <= sum(dropped) <= 250  # 200 expected, standard deviation 10
    for other in ({"task": "u"}, {"before": 1}):
        assert dropped != [_search(disturbances, f"q{number}", **other)[0] == [] for number in range(400)]
    assert dropped != [_search(Disturbances(drop=0.5, seed=1), f"q{number}")[0] == [] for number in range(400)]


def test_noise_takes_places_and_leaves_the_others():
    found = [_search(Disturbances(noise=0.5), f"q{number}") for number in range(200)]
    noisy = sum(passage.startswith("about") for passages, _ in found for passage in passages)
    assert 240 <= noisy <= 360  # of 600
    for number, (passages, changed) in enumerate(found):
        assert len(passages) == 3 and changed == any(text.startswith("about") for text in passages)
        assert all(text == f"q{number}/{rank}" or text.startswith("about") for rank, text in enumerate(passages))


def test_a_stale_index_lacks_the_same_passages_for_everybody():
    disturbances = Disturbances(stale=0.3)
    first, _ = _search(disturbances, "q", top_k=20)
    assert first == _search(disturbances, "q", task="other", before=3, top_k=20)[0]
    complete = [f"q/{rank}" for rank in range(40)]
    assert len(first) == 20 and first == [text for text in complete if text in first]  # the next best move up
    assert 20 < complete.index(first[-1]) + 1 <= 36


def test_a_delay_is_waited_for_without_holding_up_others():
    async def together() -> float:
        disturbances = Disturbances(latency_s=0.05)
        start = time.perf_counter()
        searches = [
            disturbances.search(_find, f"q{number}", 1, task_id="t", asked_before=0, others=()) for number in range(100)
        ]
        await asyncio.gather(*searches)
        return time.perf_counter() - start

    assert 0.1 < asyncio.run(together()) < 4.0  # one after the other they would take 5 s; the longest of 100 about 0.26


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop": 1.5}, r"disturbances\.drop: expected a share"),
        ({"latency_s": -1}, "latency_s"),
        ({"nois": 0.1}, "Did you mean 'noise'"),
    ],
)
def test_a_wrong_disturbance_is_one_clear_error(tmp_path, options, message):
    train = write_rows(tmp_path / "train.jsonl", [{"question": "where?", "solutions": ["Paris"]}])
    with pytest.raises(ConfigError, match=message):
        SearchEnvironment(train=train, retriever=Shelf(), disturbances=options)


def _environment(tmp_path, **options) -> SearchEnvironment:
    rows = [{"question": "where?", "solutions": ["Paris"]}]
    files = {split: write_rows(tmp_path / f"{split}.jsonl", rows) for split in ("train", "val")}
    return SearchEnvironment(**files, retriever=Shelf(Alpha="It is in Paris.", Beta="Rome."), **options)


def test_evaluation_is_not_disturbed_unless_it_is_named(tmp_path):
    search = ["<search>Alpha</search>"]
    environment = _environment(tmp_path, disturbances={"drop": 1.0})
    (disturbed,), (clean,) = converse(environment, search), converse(environment, search, split="val")
    assert "Paris" not in disturbed.observation and "Paris" in clean.observation
    assert (disturbed.metrics["disturbed"], clean.metrics["disturbed"]) == (1.0, 0.0)
    everywhere = _environment(tmp_path, disturbances={"drop": 1.0, "splits": ["train", "val"]})
    assert "Paris" not in converse(everywhere, search, split="val")[0].observation


def test_the_rates_of_the_searches_are_over_all_since_the_last_report(tmp_path):
    environment = _environment(tmp_path)
    searches = [f"<search>{query}</search>" for query in ("Alpha", "Beta", "Alpha", "nothing")]
    converse(environment, searches)
    converse(environment, searches[:1])
    report = environment.report()
    assert report["search/searches"] == 5
    assert report["search/duplicate_rate"] == 1 / 5  # within an episode
    assert report["search/empty_rate"] == 1 / 5
    assert report["search/gold_in_top_k"] == 3 / 5
    assert 0 < report["time/search_wait_s"] * 5 <= report["time/search_s"] * 1.01
    assert environment.report() == {"time/search_s": 0.0, "search/searches": 0.0}


def test_the_time_of_searches_at_the_same_time_counts_once(tmp_path):
    class Slow(Shelf):
        def search(self, queries, top_k):
            time.sleep(0.1)
            return super().search(queries, top_k)

    train = write_rows(tmp_path / "train.jsonl", [{"question": "where?", "solutions": ["Paris"]}])
    environment = SearchEnvironment(train=train, retriever=Slow(Alpha="x"))

    async def together():
        episodes = [await environment.reset(environment.tasks("train")[0]) for _ in range(8)]
        await asyncio.gather(*(environment.step(episode, "<search>Alpha</search>") for episode in episodes))

    asyncio.run(together())
    report = environment.report()
    assert 0.1 <= report["time/search_s"] < 0.4 and report["search/searches"] == 8
    assert report["time/search_wait_s"] >= 0.1
