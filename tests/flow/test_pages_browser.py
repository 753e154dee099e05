"""The page of a run, its report and the page of a retrieval server in a real browser."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rlflow_tools.view import live
from rlflow_tools.view.live import LivePage

from rlflow.report.terminal import Progress
from rlflow.rollout import Tokenizer
from rlflow.storage.files import write_json
from rlflow_environments.retrieval.server.loading import ServedSource
from tests.fixtures import tiny_tokenizer
from tests.flow.chromium import browser, texts, wait
from tests.unit.environments.retrieval.search_servers import search_server, write_corpus
from tests.unit.tools.view.crafted import (
    SEARCHED,
    attempt,
    evaluated,
    group_of,
    task,
    trained,
    write_frame,
    write_step,
)

__all__ = ["browser"]  # a fixture

pytestmark = pytest.mark.slow


@pytest.fixture
def progress() -> Progress:
    return Progress(steps=10, title="my run")


@pytest.fixture
def page(progress: Progress, monkeypatch: pytest.MonkeyPatch) -> Iterator[LivePage]:
    monkeypatch.setattr(live, "REST", 0.0)
    shown = LivePage(progress)
    yield shown
    shown.stop()


def test_the_page_follows_the_run_and_becomes_its_report(
    browser: Any, page: LivePage, progress: Progress, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_pretrained(tiny_tokenizer(tmp_path / "tokenizer"))
    run = tmp_path / "run"
    browser.get(page.url)
    wait(browser, "return document.documentElement.dataset.ready === 'true'")
    assert texts(browser, "#kinds input:not(:disabled)") == [""], "nothing but the run is there yet"
    write_frame(run, [evaluated(0, 0.35)])
    page.open(run)
    headline = "return (document.querySelector('.headline') || {}).textContent === "
    wait(browser, f"{headline} 'exact match 35%'")
    flat = [{**trained(step), "train/advantage_zero": 1.0} for step in (1, 2, 3)]
    write_frame(run, [evaluated(0, 0.35), *flat, evaluated(3, 0.89)])
    of = task("Orvan")
    write_step(run, tokenizer, 3, [group_of(of, [attempt(tokenizer, of, 0, SEARCHED)])])
    progress.step(3, trained(3))
    wait(browser, f"{headline} 'exact match 89%, was 35%'")
    assert "No group differed in reward for 3 steps" in texts(browser, "#findings li")[0]
    assert "3 of 10" in texts(browser, "#status")[0]
    width = "return document.querySelector('#run img').getBoundingClientRect().width"
    assert 300 < browser.execute_script(width) <= 1400
    browser.find_element("css selector", "body").send_keys("t")
    wait(browser, "return document.querySelectorAll('#group .t').length > 0")  # fetched
    assert texts(browser, "#group h2") == ["Where was Orvan born?"]
    summary = {"status": "finished", "steps": 3, "seconds": 61.0, "written": {}}
    write_json(run / "summary.json", summary)
    page.close()
    page.stop()
    wait(browser, "return !document.querySelector('#lost').hidden")  # it says where the report is
    browser.get((run / "report.html").as_uri())
    wait(browser, f"{headline} 'exact match 89%, was 35%'")
    assert "finished after 3 steps" in texts(browser, "#status")[0]
    problems = [entry["message"] for entry in browser.get_log("browser")]
    known = ("ERR_CONNECTION_REFUSED", "favicon")
    assert all(any(one in problem for one in known) for problem in problems), problems


def test_the_page_is_read_on_a_phone(browser: Any, page: LivePage, tmp_path: Path) -> None:
    """Nothing is wider than a screen of 390 pixels, and the letters in charts are of 10 or more."""
    tokenizer = Tokenizer.from_pretrained(tiny_tokenizer(tmp_path / "tokenizer"))
    run = tmp_path / "run"
    slow = {"train/advantage_zero": 1.0, "time/rollout_s": 1000.0, "time/step_s": 1100.0}
    write_frame(run, [*({**trained(step), **slow} for step in range(1, 8)), evaluated(7, 0.89)])
    of = task("Orvan", "x" * 200)
    write_step(run, tokenizer, 7, [group_of(of, [attempt(tokenizer, of, 0, SEARCHED)])])
    written = {"run": "/runs/" + "name" * 30}
    write_json(
        run / "summary.json",
        {"status": "finished", "steps": 7, "seconds": 61.0, "written": written},
    )
    page.open(run)
    page.close()
    screen = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    image = "var image = document.querySelector('#run img');"
    try:
        for address in (page.url, (run / "report.html").as_uri()):
            browser.get(address)
            wait(browser, f"{image} return image.complete && image.naturalWidth > 0")
            assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
            right = browser.execute_script(f"{image} return image.getBoundingClientRect().right")
            assert right <= 390, "the newest steps are at the right"
            source = browser.execute_script(f"{image} return image.currentSrc")
            svg = base64.b64decode(source.partition("base64,")[2]).decode()
            drawn = float(re.search(r'viewBox="0 0 ([\d.]+)', svg)[1])
            scale = browser.execute_script(f"{image} return image.clientWidth") / drawn
            sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", svg)]
            assert scale * min(sizes) >= 10, "pixels"
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_query_box_of_a_retrieval_server_answers(browser: Any, tmp_path: Path) -> None:
    source = ServedSource({"name": "bm25"}, str(write_corpus(tmp_path)), None)
    with search_server(source.load) as (url, _):
        browser.get(url)
        wait(browser, "return document.querySelector('#state').textContent === 'ready'")
        browser.find_element("id", "query").send_keys("number7 harbour")
        browser.find_element("css selector", "#ask button").click()
        wait(browser, "return document.querySelectorAll('#results li').length === 3")
        assert (
            "Hazel 7" in texts(browser, "#results li b")[0]
            and "harbour" in texts(browser, "#results li div")[0]
        )
        assert texts(browser, "#told")[0].startswith("3 results in ")
        wait(
            browser, "return document.querySelector('#tiles').textContent.includes('empty results')"
        )
        wait(browser, "return document.querySelector('#rate').getAttribute('points').length > 0")
        assert texts(browser, "#rate-top") != [""] and texts(browser, "#latency-top") != [""]
        browser.find_element("id", "query").clear()
        browser.find_element("id", "query").send_keys(
            "<img src=x onerror=alert(me)>"
        )  # no digit: documents have some
        browser.find_element("css selector", "#ask button").click()
        wait(
            browser,
            "return document.querySelector('#told').textContent.startsWith('0 results in ')",
        )
        assert not browser.find_elements("css selector", "img")
        problems = [entry["message"] for entry in browser.get_log("browser")]
        assert all("favicon" in problem for problem in problems), problems
