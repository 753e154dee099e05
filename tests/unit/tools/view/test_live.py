"""The page of a run that goes on: served to whoever knows the token, and nobody's problem."""

from __future__ import annotations

import base64
import html.parser
import http.client
import io
import json
import logging
import re
import socket
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rlflow_tools.view import live
from rlflow_tools.view.live import LivePage
from rlflow_tools.view.recorded import RunFiles

from rlflow.report.terminal import Progress
from rlflow.rollout import Tokenizer
from rlflow.run.directory import RunDirectory
from rlflow.storage.files import write_json, write_text
from tests.unit.tools.view.crafted import evaluated, small_run, trained, write_frame
from tests.unit.tools.view.test_page import hostile_run

SUMMARY = {
    "status": "finished",
    "steps": 2,
    "seconds": 65.0,
    "written": {"run": "runs/a", "export": "runs/a/export"},
}


@pytest.fixture
def run(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    return small_run(tmp_path / "run", tokenizer)


@pytest.fixture
def progress() -> Progress:
    return Progress(steps=10, title="demo")


@pytest.fixture
def page(progress: Progress, monkeypatch: pytest.MonkeyPatch) -> Iterator[LivePage]:
    monkeypatch.setattr(
        live, "REST", 0.0
    )  # a test does not wait for what a run need not hurry with
    shown = LivePage(progress)
    yield shown
    shown.stop()


def get(url: str, **headers: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
        return str(answer.read().decode())


def refused(url: str, **headers: str) -> int:
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(url, **headers)
    return caught.value.code


def now(page: LivePage, version: int = -1) -> dict[str, Any]:
    return dict(json.loads(get(f"{page.url}now-{version}")))


def test_the_page_tells_how_the_run_goes_from_before_there_is_a_directory(
    page: LivePage, progress: Progress, run: Path
) -> None:
    progress.phase("loading", "the trainer")
    assert "loading the trainer" in get(page.url) and "0 of 10" in get(page.url)
    assert now(page)["index"]["groups"] == []
    page.open(run)
    progress.phase("rollout")
    progress.step(2, trained(2))
    told = now(page)
    assert "2 of 10" in told["status"] and "rollout" in told["status"]
    assert "exact match 100%, was 50%" in told["overview"] and told["index"]["opens"] == "run"
    assert "EM 0.500 [0.400, 0.600]" in told["overview"] and "12 episodes" in told["holds"]


def test_what_the_browser_knows_is_not_sent_again_until_the_run_has_written_more(
    page: LivePage, run: Path
) -> None:
    page.open(run)
    first = now(page)
    assert now(page, first["version"]).keys() == {"status", "version"}
    flat = [{**trained(step), "train/advantage_zero": 1.0} for step in (3, 4, 5)]
    with RunDirectory(run).metrics.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in flat)
    later = now(page, first["version"])
    assert later["version"] == first["version"] + 1
    assert "No group differed" in later["findings"] and "Step 5" in later["overview"]


def test_a_second_evaluation_at_a_step_takes_the_place_of_the_first(
    page: LivePage, run: Path
) -> None:
    page.open(run)
    before = [group["task"] for group in now(page)["index"]["groups"] if group["kind"] == "eval"]
    file = max(RunFiles.open(run).evaluations.values())
    lines = file.read_text().splitlines(keepends=True)
    write_text(file, "".join(line for line in lines if f'"{before[-1]}"' in line))
    after = [group["task"] for group in now(page)["index"]["groups"] if group["kind"] == "eval"]
    assert len(after) < len(before) and after[-1] == before[-1]


def test_a_look_at_the_files_is_followed_by_a_rest(
    page: LivePage, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "REST", 1e6)
    page.open(run)
    first = now(page)["version"]
    RunDirectory(run).metrics.write_text(json.dumps(trained(1)) + "\n")
    assert now(page)["version"] == first


def test_a_group_is_fetched_when_it_is_looked_at(page: LivePage, run: Path) -> None:
    page.open(run)
    group = now(page)["index"]["groups"][3]
    packed = base64.b64decode(get(page.url + group["chunk"]))
    data = json.loads(zlib.decompress(packed))[group["place"]]
    assert data["question"] == "Where was Telmik born?" and "tokens" in data["attempts"][0]
    for name in ("chunk-train-2-1", "chunk-train-7-0", "chunk-x", "chunk-train-2-0/..", "other"):
        assert refused(page.url + name) == 404


def test_only_whoever_knows_the_token_sees_it_and_no_page_of_another_name(page: LivePage) -> None:
    token = page.url.split("/")[3]
    base = page.url.removesuffix(f"{token}/")
    assert base.startswith("http://127.0.0.1:") and len(token) >= 20
    addresses = (base, f"{base}wrong/", f"{base}now-0", f"{page.url}../x")
    assert {refused(address) for address in addresses} == {404}
    assert refused(page.url, Host="evil.example:80") == 404, "DNS rebinding"
    other = LivePage(Progress())
    assert other.url != page.url
    other.stop()


class Elements(html.parser.HTMLParser):
    """The tags and attributes of a document as a browser would see them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_nothing_from_outside_becomes_markup(
    page: LivePage, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    page.open(hostile_run(tmp_path / "<b>run", tokenizer))
    told = now(page)
    for text in (get(page.url), told["findings"] + told["overview"]):
        found = Elements(text)
        names = {name for _, attributes in found.tags for name in attributes}
        images = [attributes["src"] or "" for tag, attributes in found.tags if tag == "img"]
        assert all(image.startswith("data:image/svg+xml;base64,") for image in images)
        assert not [name for name in names if name.startswith("on")] and "\x1b" not in text
        assert {"iframe", "object", "b>run"}.isdisjoint(tag for tag, _ in found.tags)


def test_the_page_loads_nothing_and_allows_only_its_own_script(page: LivePage, run: Path) -> None:
    page.open(run)
    connection = http.client.HTTPConnection(page.url.split("/")[2], timeout=10)
    connection.request("GET", "/" + page.url.split("/", 3)[3])
    answer = connection.getresponse()
    body, rules = answer.read().decode(), answer.headers["Content-Security-Policy"]
    connection.close()
    nonce = re.search(r"script-src 'nonce-([^']+)'", rules)
    assert nonce and f'<script nonce="{nonce[1]}">' in body and rules in body
    assert "default-src 'none'" in rules and "unsafe-inline'; script" in rules
    assert not re.search(r"(?:src|href)=\"(?!data:)", body) and "https://" not in body


def test_the_report_is_the_page_as_a_file(page: LivePage, run: Path) -> None:
    write_json(run / "summary.json", SUMMARY)
    page.open(run)
    page.close()
    text = (run / "report.html").read_text()
    assert "finished after 2 steps and 1:05" in text and "rlflow show runs/a" in text
    assert "fetch(" not in text and "chunk-eval-2-0" in text


def test_a_run_that_stores_no_episodes_has_a_report_too(page: LivePage, tmp_path: Path) -> None:
    page.open(write_frame(tmp_path, [evaluated(0, 0.35), trained(1)]))
    page.close()
    assert "exact match 35%" in (tmp_path / "report.html").read_text()


def test_a_port_that_is_taken_is_one_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(live, "ADDRESS", taken.getsockname())
        page = LivePage(Progress())
        page.stop()
    assert page.url == ""
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "metrics.page: no page (Address already in use)" in caplog.text


def test_the_terminal_says_where_the_page_is() -> None:
    stream = io.StringIO()
    page = LivePage(Progress("plain", stream=stream))
    assert f"page: {page.url}\n" in stream.getvalue()
    page.stop()


@pytest.mark.parametrize("damaged", [True, False], ids=["damaged episodes", "no place"])
def test_a_report_that_cannot_be_written_is_one_line_in_the_log(
    page: LivePage, run: Path, caplog: pytest.LogCaptureFixture, damaged: bool
) -> None:
    if damaged:
        RunDirectory(run).trajectories(2).write_text("[1]\n")
    else:
        (run / "report.html").mkdir()
    page.open(run)
    page.close()
    assert len(caplog.records) == 1 and "not written" in caplog.text
    assert not (run / "report.html").is_file()


# ---------------------------------------------------------------- slow and silent clients


def test_clients_that_hang_or_leave_cost_nothing(page: LivePage, progress: Progress) -> None:
    host, port = page.url.split("/")[2].split(":")
    others = threading.active_count()
    hanging = [socket.create_connection((host, int(port))) for _ in range(40)]  # more than served
    for one in hanging[:20]:
        one.close()
    progress.step(1, trained(1))
    serving = threading.active_count() - others
    for one in hanging[20:]:
        one.close()
    assert serving < 20
    for _ in range(50):  # until the server has noticed that they left
        try:
            assert "1 of 10" in get(page.url)
            break
        except (OSError, http.client.HTTPException):
            continue
    else:
        pytest.fail("the page does not answer any more")


def test_clients_that_are_slow_hold_no_place_that_another_one_needs(
    page: LivePage, progress: Progress
) -> None:
    """Sixteen that sent a byte now and then would keep everybody else out for ever."""
    host, port = page.url.split("/")[2].split(":")
    most = live.MOST_CLIENTS + 4
    slow = [socket.create_connection((host, int(port))) for _ in range(most)]
    for one in slow:
        one.sendall(b"GET /")
    progress.step(1, trained(1))
    assert "1 of 10" in get(page.url)
    for one in slow:
        one.close()


def test_a_request_that_trickles_is_over_at_its_deadline(
    page: LivePage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "REQUEST_S", 1.0)
    host, port = page.url.split("/")[2].split(":")
    slow = socket.create_connection((host, int(port)))
    began = time.monotonic()
    with pytest.raises(OSError):
        for _ in range(100):
            slow.sendall(b"x")
            time.sleep(0.1)
    assert time.monotonic() - began < 8
