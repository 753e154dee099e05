"""The page of a run: escaped, self-contained, served to whoever knows the token, and nobody's problem where it fails."""

from __future__ import annotations

import html.parser
import http.client
import logging
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from rlflow.report import live_page, page_server
from rlflow.report.display import SeveralDisplays, make_display
from rlflow.report.live_page import LivePage
from rlflow.report.metrics import Metric
from rlflow.report.pace import Clock, Pace
from rlflow.report.progress import Progress
from rlflow.report.run_page import PageState, render_page
from rlflow.report.svg import learning_curves, ticks, time_bars
from rlflow.types import StopReason, Trajectory, Turn

REGISTERED = {"exact_match": Metric("share", "of tasks", score=True)}
EVALUATION = {"eval/exact_match": 0.35, "eval/exact_match_low": 0.3, "eval/exact_match_high": 0.4}
STEP = {"train/reward": 0.5, "train/exact_match": 0.4, "time/rollout_s": 1.5, "time/update_s": 0.5, "time/step_s": 2.0}
EVIL = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[2J\ud83d'\"&"
SUMMARY = {"status": "finished", "steps": 2, "seconds": 65.0, "written": {"run": "runs/a", "export": "runs/a/export"}}


def attempt(task: str, response: str = "Paris", reward: float = 1.0) -> Trajectory:
    turns = [Turn(0, 0, 1, reward, 1.0, response, "an answer")]
    return Trajectory(task, "g", [], turns, reward, StopReason.TERMINATED, prompt=f"Capital of {task}?")


@pytest.fixture
def page(tmp_path: Path):
    live = LivePage(Pace(10), "demo")
    live.registered = REGISTERED
    live.report = tmp_path / "report.html"
    yield live
    live.close()


def get(url: str, **headers: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
        return str(answer.read().decode())


def refused(url: str, **headers: str) -> int:
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(url, **headers)
    return caught.value.code


class Elements(html.parser.HTMLParser):
    """The tags and attributes of a document as a browser would see them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_page_tells_headline_curve_time_episodes_and_warnings_while_the_run_goes_on(page: LivePage) -> None:
    page.evaluated(0, EVALUATION)
    page.step(1, STEP)
    page.evaluated(1, {**EVALUATION, "eval/exact_match": 0.886})
    page.phase("rollout")
    page.episode(3, 128, attempt("France"))
    for step in (2, 3, 4):
        page.step(step, {**STEP, "train/advantage_zero": 1.0})
    shown = get(page.url)
    for words in ("exact match 89%, was 35%", "rollout (3 of 128 episodes)", "step 4</b> No group differed", "Paris",
                  "Capital of France?", "an answer", "rollout 75%", "step 4 of 10", "reward (training) 0.50",
                  "exact match 0.350 [0.300, 0.400]"):  # fmt: skip
        assert words in shown, words
    content = get(page.url + "content")
    assert "<script" not in content and "exact match 89%" in content
    page.episode(4, 128, attempt("Spain"))
    assert "4 of 128" in get(page.url + "content")


def test_only_whoever_knows_the_token_sees_it_and_no_page_of_another_name(page: LivePage) -> None:
    base = page.url.removesuffix(page.url.split("/")[3] + "/")
    assert base.startswith("http://127.0.0.1:") and len(page.url.split("/")[3]) >= 20
    assert {refused(base), refused(base + "wrong/"), refused(base + "content"), refused(page.url + "../x")} == {404}
    assert refused(page.url, Host="evil.example:80") == 404, "DNS rebinding"
    assert LivePage(Pace(1), "x").url != page.url


def test_nothing_from_outside_becomes_markup(tmp_path: Path) -> None:
    live = LivePage(Pace(3), EVIL)
    live.report = tmp_path / "report.html"
    live.registered = {EVIL: Metric("share", EVIL, score=True)}
    live.phase(EVIL)
    live.episode(1, 1, attempt(EVIL, EVIL))
    live.evaluated(0, {f"eval/{EVIL}": 0.5, f"eval/{EVIL}_low": 0.1, f"eval/{EVIL}_high": 0.9})
    live.step(1, {**STEP, f"train/{EVIL}": 0.5})
    live.finished({**SUMMARY, "status": EVIL, "written": {"run": EVIL}})
    served = get(live.url)
    live.close()
    for text in (served, live.report.read_text()):
        found = Elements(text)
        assert not [tag for tag, _ in found.tags if tag in ("img", "iframe", "object", "link")]
        assert not [name for _, attributes in found.tags for name in attributes if name.startswith("on")]
        assert "alert(1)</script>" not in text and "\x1b" not in text
    assert [tag for tag, _ in Elements(served).tags].count("script") == 1  # its own
    assert [tag for tag, _ in Elements(live.report.read_text()).tags].count("script") == 0


def test_the_page_loads_nothing_and_allows_only_its_own_script(page: LivePage) -> None:
    connection = http.client.HTTPConnection(page.url.split("/")[2], timeout=10)
    connection.request("GET", "/" + page.url.split("/", 3)[3])
    answer = connection.getresponse()
    body, rules = answer.read().decode(), answer.headers["Content-Security-Policy"]
    nonce = re.search(r"script-src 'nonce-([^']+)'", rules)
    assert nonce and f'<script nonce="{nonce[1]}">' in body and "default-src 'none'" in rules
    assert not re.search(r"(?:src|href)=", body) and "http://" not in body and "https://" not in body
    connection.close()


def test_the_report_of_the_end_is_the_page_without_a_script(page: LivePage) -> None:
    page.step(1, STEP)
    page.evaluated(2, EVALUATION)
    assert page.report is not None and page.report.is_file(), "also of a run that is killed later"
    page.finished(SUMMARY)
    text = page.report.read_text()
    assert "finished after 2 steps and 1:05" in text and "rlflow show runs/a" in text and "<script" not in text


def test_a_resumed_page_has_the_earlier_steps(page: LivePage) -> None:
    page.restore([{"step": 0, **EVALUATION}, {"step": 1, **STEP}])
    page.step(2, {**STEP, "train/reward": 0.75})
    assert "<title>step 1: " in get(page.url) and "reward (training) 0.75" in get(page.url)


def test_a_port_that_is_taken_is_one_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        original = live_page.PageServer
        monkeypatch.setattr(live_page, "PageServer", lambda page, content: original(page, content, port))
        display, live = make_display("none", page=True, steps=3, title="x", first_step=0, clock=Clock())
        display.step(1, STEP)
        display.close()
    assert live is not None and live.url == ""
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "metrics.page: the page cannot be served (Address already in use)" in caplog.text


def test_a_full_disk_is_one_line_in_the_log(page: LivePage, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    page.report = tmp_path / "not there" / "deep" / "report.html"
    (tmp_path / "not there").write_text("a file")
    page.evaluated(1, EVALUATION)
    page.evaluated(2, EVALUATION)
    page.finished(SUMMARY)
    assert len(caplog.records) == 1 and "cannot be written" in caplog.text


def test_clients_that_hang_or_leave_cost_nothing(page: LivePage) -> None:
    host, port = page.url.split("/")[2].split(":")
    others = threading.active_count()
    hanging = [socket.create_connection((host, int(port))) for _ in range(40)]  # more than are served at a time
    for one in hanging[:20]:
        one.close()
    page.step(1, STEP)
    serving = threading.active_count() - others
    for one in hanging[20:]:
        one.close()
    assert serving < 20
    for _ in range(50):  # until the server has noticed that they left
        try:
            assert "step 1 of 10" in get(page.url)
            break
        except (OSError, http.client.HTTPException):
            continue
    else:
        pytest.fail("the page does not answer any more")


def test_clients_that_are_slow_hold_no_place_that_another_one_needs(page: LivePage) -> None:
    """Sixteen that sent a byte now and then kept everybody else out for ever."""
    host, port = page.url.split("/")[2].split(":")
    slow = [socket.create_connection((host, int(port))) for _ in range(page_server.MOST_CLIENTS + 4)]
    for one in slow:
        one.sendall(b"GET /")
    page.step(1, STEP)
    assert "step 1 of 10" in get(page.url)
    for one in slow:
        one.close()


def test_a_request_that_trickles_is_over_at_its_deadline(page: LivePage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "REQUEST_S", 1.0)
    host, port = page.url.split("/")[2].split(":")
    slow = socket.create_connection((host, int(port)))
    began = time.monotonic()
    with pytest.raises(OSError):
        for _ in range(100):
            slow.sendall(b"x")
            time.sleep(0.1)
    assert time.monotonic() - began < 8


def test_the_page_shows_the_last_episodes_of_different_tasks(page: LivePage) -> None:
    for number in range(20):
        page.episode(number, 20, attempt(f"country{number // 2}", f"answer{number}"))
    shown = get(page.url)
    assert re.findall(r"answer(\d+)", shown) == ["19", "17", "15", "13"]


def test_several_displays_are_told_the_same(page: LivePage) -> None:
    both = SeveralDisplays([Progress(), page])
    both.registered = REGISTERED
    both.restore([])
    both.phase("update")
    both.step(3, STEP)
    both.message("x")
    assert page.registered is REGISTERED and both.registered is REGISTERED
    assert "step 3 of 10" in get(page.url) and "update" in get(page.url)


def test_rendering_is_cheap_for_a_long_run() -> None:
    """Two thousand steps are drawn in well under the time of one, and in few points."""
    records = [{"step": step, **STEP, **(EVALUATION if step % 10 == 0 else {})} for step in range(2000)]
    text = render_page(PageState("long", 2000, REGISTERED, records))
    assert len(text) < 300_000 and max(len(points.split()) for points in re.findall(r'points="([^"]*)"', text)) <= 402


# ---------------------------------------------------------------- drawing


def test_ticks_are_round_and_steps_whole() -> None:
    assert ticks(0.0, 1.0, 5) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(0, 3, 8, whole=True) == [0, 1, 2, 3]
    assert ticks(0, 60, 8, whole=True) == [0, 10, 20, 30, 40, 50, 60]
    assert ticks(-3.0, 1.0, 5) == [-3, -2, -1, 0, 1] and ticks(1.0, 1.0, 5) == [1.0]


def test_an_interval_is_drawn_where_it_was_measured_and_nothing_for_a_run_without_numbers() -> None:
    records = [{"step": 0, **EVALUATION}, {"step": 5, **STEP}, {"step": 10, **EVALUATION}]
    drawn = learning_curves(records, "exact_match")
    assert drawn.count('class="interval"') == 2 and drawn.count("<circle") == 2
    assert learning_curves([], "reward") == "" and time_bars([{"step": 1}]) == ""
