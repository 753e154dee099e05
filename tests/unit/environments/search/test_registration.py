"""What the search plug-in registers with the core: metrics, options, jobs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlflow.report.metrics import scores
from rlflow.report.reductions import reduced
from rlflow_environments.browser.miniwob import MiniWob
from rlflow_environments.retrieval.corpus import Passage, make_contents, write_corpus, write_rows
from rlflow_environments.search import SearchEnvironment
from rlflow_environments.search.metrics import METRICS


@pytest.fixture
def environment(tmp_path: Path) -> SearchEnvironment:
    text = "Orvan Telmik was a painter. His birthplace was Velmora."
    corpus = write_corpus(
        tmp_path / "corpus.jsonl", [Passage("1", "Orvan", make_contents("Orvan", text), "")]
    )
    row = {"question": "where was Orvan Telmik born", "solutions": ["Velmora"], "hops": 1}
    train = write_rows(tmp_path / "train.jsonl", [row])
    return SearchEnvironment(corpus, train, top_k=1)


def test_every_number_that_the_environment_reports_is_registered(
    environment: SearchEnvironment,
) -> None:
    async def play() -> dict[str, float]:
        episode = await environment.reset(environment.tasks("train")[0])
        metrics: dict[str, Any] = {}
        for response in (
            "<search>Orvan birthplace</search>",
            "garbage",
            "<answer>Velmora</answer>",
        ):
            episode.turns += 1
            metrics |= (await environment.step(episode, response)).metrics
        return metrics

    reported = {**asyncio.run(play()), **environment.report()}
    assert {"exact_match", "searches", "hops", "search/gold_in_top_k"} <= set(reported)
    assert set(reported) <= set(environment.metrics)
    assert scores(environment.metrics) == ["exact_match", "f1"]


def test_counts_of_rollout_workers_are_added_up() -> None:
    registered = {**METRICS, **MiniWob.metrics}
    for name in ("search/searches", "browser/restarts", "browser/lost_pages"):
        assert reduced([{name: 10.0}, {name: 90.0}], registered) == {name: 100.0}


def test_what_the_command_line_loads_of_the_plug_in_is_light() -> None:
    program = (
        "import sys; from rlflow_environments.search import plug_in; "
        "print(sorted({'torch', 'numpy', 'faiss', 'aiohttp'} & set(sys.modules)), [option.flag for option in plug_in.OPTIONS])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[] ['--train-data', '--val-data', '--corpus', '--pages']", (
        done.stderr
    )
