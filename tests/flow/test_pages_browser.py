"""The page of a run, its report and the page of a retrieval server in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlflow.report.live_page import LivePage
from rlflow.report.metrics import Metric
from rlflow.report.pace import Pace
from rlflow.rollout import Tokenizer
from rlflow_environments.retrieval.server.loading import ServedSource
from tests.fixtures import tiny_tokenizer
from tests.flow.chromium import browser, texts, wait
from tests.unit.environments.retrieval.search_servers import search_server, write_corpus
from tests.unit.report.crafted import SEARCHED, attempt, evaluated, task, trained

__all__ = ["browser"]  # a fixture

pytestmark = pytest.mark.slow
REGISTERED = {"exact_match": Metric("share", "of questions answered", score=True, shown="EM {:.3f}")}


@pytest.fixture
def page(tmp_path: Path) -> Iterator[LivePage]:
    live = LivePage(Pace(10), "my run")
    live.registered, live.report = REGISTERED, tmp_path / "report.html"
    yield live
    live.close()


def test_the_page_follows_the_run_and_becomes_its_report(browser: Any, page: LivePage, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(tiny_tokenizer(tmp_path / "tokenizer"))
    page.evaluated(0, evaluated(0, 0.35))
    browser.get(page.url)
    assert texts(browser, ".headline") == ["exact match 35%"] and not texts(browser, ".warnings li")
    for step in (1, 2, 3):
        page.step(step, {**trained(step), "train/advantage_zero": 1.0})
    page.evaluated(3, evaluated(3, 0.89))
    page.episode(1, 8, attempt(tokenizer, task("Orvan"), 0, SEARCHED))
    wait(browser, "return document.querySelector('.headline').textContent === 'exact match 89%, was 35%'")
    assert "No group differed in reward for 3 steps" in texts(browser, ".warnings li")[0]
    assert len(browser.find_elements("css selector", "circle.evaluated")) == 2
    assert "Where was Orvan born?" in texts(browser, "article")[0]
    shown = browser.execute_script("return document.querySelector('svg').getBoundingClientRect().width")
    assert 300 < shown <= 1400
    page.finished({"status": "finished", "steps": 3, "seconds": 61.0, "written": {}})
    page.close()
    wait(browser, "return !document.querySelector('#lost').hidden")  # it says where the report is
    browser.get((tmp_path / "report.html").as_uri())
    assert texts(browser, ".headline") == ["exact match 89%, was 35%"] and "finished after 3 steps" in texts(browser, "h1")[0]
    problems = [entry["message"] for entry in browser.get_log("browser")]
    assert all("ERR_CONNECTION_REFUSED" in problem or "favicon" in problem for problem in problems), problems


def test_the_page_is_read_on_a_phone(browser: Any, page: LivePage, tmp_path: Path) -> None:
    """Nothing is wider than a screen of 390 pixels, and the letters in charts are as large there as any small print."""
    tokenizer = Tokenizer.from_pretrained(tiny_tokenizer(tmp_path / "tokenizer"))
    for step in range(1, 8):
        page.step(step, {**trained(step), "train/advantage_zero": 1.0, "time/rollout_s": 1000.0, "time/step_s": 1100.0})
    page.evaluated(7, evaluated(7, 0.89))
    page.episode(1, 8, attempt(tokenizer, task("Orvan", "x" * 200), 0, SEARCHED))
    page.finished({"status": "finished", "steps": 7, "seconds": 61.0, "written": {"run": "/runs/" + "name" * 30}})
    screen = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    try:
        for address in (page.url, (tmp_path / "report.html").as_uri()):
            browser.get(address)
            assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
            heights = "return [...document.querySelectorAll('svg text')].map((one) => one.getBoundingClientRect().height)"
            assert min(browser.execute_script(heights)) >= 10, "pixels"
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_query_box_of_a_retrieval_server_answers(browser: Any, tmp_path: Path) -> None:
    source = ServedSource({"name": "bm25"}, str(write_corpus(tmp_path)), None)
    with search_server(source.load) as (url, service):
        browser.get(url)
        wait(browser, "return document.querySelector('#recent').textContent.includes('ends in #TOKEN')")
        browser.get("about:blank")  # from one fragment to another a page is not loaded again
        browser.get(f"{url}#{service.admin_token}")
        wait(browser, "return document.querySelector('#state').textContent === 'ready'")
        browser.find_element("id", "query").send_keys("number7 harbour")
        browser.find_element("css selector", "#ask button").click()
        wait(browser, "return document.querySelectorAll('#results li').length === 3")
        assert "Hazel 7" in texts(browser, "#results li b")[0] and "harbour" in texts(browser, "#results li div")[0]
        assert texts(browser, "#told")[0].startswith("3 results in ")
        wait(browser, "return document.querySelectorAll('#recent tr').length === 1")
        assert "number7 harbour" in texts(browser, "#recent tr")[0] and "3 found" in texts(browser, "#recent tr")[0]
        wait(browser, "return document.querySelector('#rate').getAttribute('points').length > 0")
        assert texts(browser, "#rate-top") != [""] and texts(browser, "#latency-top") != [""]
        browser.find_element("id", "query").clear()
        browser.find_element("id", "query").send_keys("<img src=x onerror=alert(1)>")
        browser.find_element("css selector", "#ask button").click()
        wait(browser, "return document.querySelectorAll('#recent tr').length === 2")
        assert not browser.find_elements("css selector", "img")
        problems = [entry["message"] for entry in browser.get_log("browser")]
        assert all("favicon" in problem for problem in problems), problems
