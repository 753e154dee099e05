"""The page in a real browser, from disk: headless Chromium, driven over the WebDriver protocol."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rlflow_tools.view.page import write_page
from rlflow_tools.view.recorded import RunFiles

from rlflow.rollout import Tokenizer
from tests.fixtures import tiny_tokenizer
from tests.flow.chromium import browser, texts, wait
from tests.unit.tools.view.crafted import (
    SEARCHED,
    attempt,
    forked_run,
    group_of,
    small_run,
    task,
    trained,
    write_evaluation,
    write_frame,
    write_step,
)

__all__ = ["browser"]  # a fixture

pytestmark = pytest.mark.slow
PAINT_S = 2.0
WORDS = [
    f"{one}{other}"
    for one in ("vas", "tel", "or", "mik", "pud", "nem", "kor", "ril")
    for other in ("mere", "ask", "van", "gis", "na")
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def opened(browser: Any, tmp_path: Path, tokenizer: Tokenizer) -> Iterator[Any]:
    open_page(browser, small_run(tmp_path, tokenizer))
    yield browser
    assert [entry["message"] for entry in browser.get_log("browser")] == []


def open_page(browser: Any, run: Path) -> None:
    write_page(RunFiles.open(run), run / "view.html")
    browser.get((run / "view.html").as_uri())
    wait(browser, "return document.documentElement.dataset.ready === 'true'")


def heading(browser: Any, text: str) -> None:
    wait(
        browser,
        f"return (document.querySelector('#group h2') || {{}}).textContent === {json.dumps(text)}",
    )


def press(browser: Any, *keys: str) -> None:
    for key in keys:
        browser.find_element("css selector", "body").send_keys(key)


def choose(browser: Any, selector: str, value: str) -> None:
    script = (
        "const e = document.querySelector(arguments[0]); e.value = arguments[1];"
        "for (const name of ['input', 'change']) e.dispatchEvent(new Event(name, {bubbles: true}));"
    )
    browser.execute_script(script, selector, value)


def test_a_table_tells_the_score_by_attribute_of_the_tasks(opened: Any) -> None:
    """Of all groups of the step, whatever the filters leave in the list."""
    assert texts(opened, "#scores tr") == [
        "hops groups solved reward",
        "1 1 50% 0.50",
        "2 1 50% 0.50",
    ]
    press(opened, "e")
    choose(opened, "#outcome", "f")
    grown = ["hops groups solved at first reward", "1 1 100% 100% 1.00", "2 1 100% 0% 1.00"]
    assert texts(opened, "#scores tr") == grown


def test_a_group_stands_in_columns_with_rewards_and_advantages(opened: Any) -> None:
    heading(opened, "Where was Orvan born?")
    assert texts(opened, ".column h3") == ["attempt 1", "attempt 2"]
    outcomes = texts(opened, ".column .outcome")
    assert (
        "solved" in outcomes[0]
        and "reward 1 · advantage +0.50" in outcomes[0]
        and "advantage -0.50" in outcomes[1]
    )
    marked = opened.execute_script(
        "return [...document.querySelectorAll('.context mark')].map((m) => m.textContent)"
    )
    assert marked and set(marked) == {"Vasmere"}
    gold = opened.execute_script(
        "return [...document.querySelectorAll('.column:first-child .t.gold')].map((t) => t.textContent)"
    )
    assert "".join(gold) == "Vasmere"


def test_slider_and_filters_choose_groups(opened: Any) -> None:
    assert opened.find_element("id", "at").text == "2"
    choose(opened, "#step", "0")
    assert opened.find_element("id", "at").text == "1" and len(texts(opened, "#list li")) == 2
    choose(opened, "#attributes select[name=hops]", "2")
    heading(opened, "Where was Telmik born?")
    assert opened.find_element("id", "count").text == "1 of 2 groups"
    choose(opened, "#outcome", "a")
    wait(opened, "return document.querySelector('#group').textContent.includes('No group fits')")
    choose(opened, "#outcome", "f")
    choose(opened, "#attributes select[name=hops]", "")
    choose(opened, "#words", "orvan")
    assert opened.find_element("id", "count").text == "1 of 2 groups"


def test_evaluations_stand_beside_the_first_one(opened: Any) -> None:
    press(opened, "e")
    choose(opened, "#outcome", "changed")
    heading(opened, "Where was Telmik born?")
    assert texts(opened, ".column h3") == ["first evaluation, step 0", "step 2"]
    assert [
        "failed" in texts(opened, ".column .outcome")[0],
        "solved" in texts(opened, ".column .outcome")[1],
    ] == [
        True,
        True,
    ]
    press(opened, "b")
    wait(opened, "return document.querySelectorAll('.column').length === 1")


def test_a_forked_episode_shows_what_was_in_view_before_a_turn(
    browser: Any, tmp_path: Path
) -> None:
    open_page(browser, forked_run(tmp_path))
    heading(browser, "Where was Orvan born?")
    assert "rewritten before turn 2" in texts(browser, ".column summary")
    opened = "const e = document.querySelector('[data-name=\"rewritten before turn 2\"]'); e.open = true; return e.textContent"
    wait(browser, f"{opened}.includes('Park.')")
    assert "hm" not in browser.execute_script(opened)


def test_tokens_are_tinted_and_tell_their_numbers(opened: Any) -> None:
    from selenium.webdriver import ActionChains

    heading(opened, "Where was Orvan born?")
    colors = (
        "return [...document.querySelectorAll('.t')].filter((t) => t.style.backgroundColor).length"
    )
    assert opened.execute_script(colors) > 0
    token = opened.find_elements("css selector", ".t")[3]
    ActionChains(opened).move_to_element(token).perform()
    wait(opened, "return !document.querySelector('#tip').hidden")
    tip = opened.find_element("id", "tip").text
    for word in (
        "id",
        "version",
        "log-prob",
        "engine - trainer",
        "entropy",
        "advantage",
        "probability",
    ):
        assert word in tip.splitlines(), tip
    assert "0.5000" in tip
    for option in ("entropy", "gap", "advantages"):
        choose(opened, "#tint", option)
        assert option == "gap" or opened.execute_script(colors) > 0
    choose(opened, "#tint", "")
    assert opened.execute_script(colors) == 0


def test_everything_works_by_keyboard(opened: Any) -> None:
    from selenium.webdriver import Keys

    press(opened, Keys.ARROW_LEFT)
    assert opened.find_element("id", "at").text == "1"
    press(opened, "j")
    heading(opened, "Where was Telmik born?")
    press(opened, "k")
    heading(opened, "Where was Orvan born?")
    press(opened, "n", "n", "n", "p")
    wait(opened, "return !document.querySelector('#tip').hidden")
    here = opened.execute_script(
        "return [...document.querySelectorAll('.t')].findIndex((t) => t.classList.contains('here'))"
    )
    assert here == 1
    press(opened, "2")
    assert opened.execute_script("return document.querySelector('#tint').value") == "entropy"
    press(opened, "o")
    assert opened.execute_script("return document.querySelector('[data-name=prompt]').open")
    press(opened, "?")
    assert opened.find_element("id", "keys").is_displayed()
    press(opened, "/")
    opened.switch_to.active_element.send_keys("telm")
    assert opened.find_element("id", "count").text == "1 of 2 groups"
    opened.switch_to.active_element.send_keys(Keys.ESCAPE)
    press(opened, "e")
    wait(opened, "return document.querySelector('#kinds input:checked').value === 'eval'")


def test_text_from_outside_stays_text(browser: Any, tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Also as an answer, which is marked in what was said: a hyphen that is escaped ends the script."""
    hostile = "<img src=x-y onerror=\"document.title='taken'\"></script><script>document.title='taken'</script>"
    write_frame(tmp_path, [trained(1)])
    of = task(hostile, hostile, hostile, kind="<b>k")
    write_step(
        tmp_path,
        tokenizer,
        1,
        [group_of(of, [attempt(tokenizer, of, 0, [(hostile, hostile), (hostile, hostile)])])],
    )
    open_page(browser, tmp_path)
    heading(browser, hostile)
    press(browser, "o", "n")
    assert browser.title == tmp_path.name and not browser.find_elements(
        "css selector", "img:not([src^='data:'])"
    )
    assert [entry["message"] for entry in browser.get_log("browser")] == []


def test_ten_thousand_episodes_are_painted_in_two_seconds(
    browser: Any,
    tmp_path: Path,
    tokenizer: Tokenizer,
    record_property: Callable[[str, object], None],
) -> None:
    write_frame(tmp_path, [trained(step) for step in range(101)])
    tasks = [
        task(f"name {number} of a question of usual length", hops=number % 3)
        for number in range(1000)
    ]
    chance = random.Random(0)

    def long() -> list[tuple[str, str]]:
        shown = " ".join(chance.choice(WORDS) for _ in range(120))
        return [
            (
                f"<think>{' '.join(chance.sample(WORDS, 6))}</think>{SEARCHED[0][0]}",
                f"{SEARCHED[0][1]}{shown}",
            ),
            SEARCHED[1],
        ]

    for step in range(1, 101):
        groups = []
        for of in tasks[step * 8 : step * 8 + 8]:
            groups.append(
                group_of(
                    of,
                    [
                        attempt(tokenizer, of, number, long(), step=step - 1, solved=number > 3)
                        for number in range(8)
                    ],
                )
            )
        write_step(tmp_path, tokenizer, step, groups)
    for step in (0, 25, 50, 100):
        write_evaluation(
            tmp_path,
            step,
            [
                group_of(of, [attempt(tokenizer, of, 0, long(), step=-1 - step)])
                for of in tasks[:900]
            ],
        )
    content, _ = write_page(RunFiles.open(tmp_path), tmp_path / "view.html")
    assert content.holds.startswith("10,000 episodes in ")
    browser.get((tmp_path / "view.html").as_uri())
    wait(browser, "return document.querySelector('#group h2') !== null", 20)
    painted_s = (
        browser.execute_script(
            "return performance.getEntriesByName('first-contentful-paint')[0].startTime"
        )
        / 1000
    )
    record_property("first_paint_s", painted_s)
    record_property("page_mb", (tmp_path / "view.html").stat().st_size / 1e6)
    print(
        f"first paint {painted_s:.2f} s, page {(tmp_path / 'view.html').stat().st_size / 1e6:.1f} MB"
    )
    assert painted_s < PAINT_S
    heading(browser, tasks[800].metadata["question"])  # of the last step
    press(browser, "e", "j")
    heading(browser, tasks[801].metadata["question"])
    assert [entry["message"] for entry in browser.get_log("browser")] == []
