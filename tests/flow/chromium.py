"""Headless Chromium for tests of pages, driven over the WebDriver protocol."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip(
        "selenium.webdriver", reason="selenium is not installed: the extra 'browser'"
    )
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("no chromium or chromedriver: apt install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--window-size=1400,900",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(executable_path=driver)
    )
    started.set_page_load_timeout(60)
    yield started
    started.quit()


def wait(browser: Any, script: str, limit_s: float = 10.0) -> None:
    """Returns when the script says true; fails with the page's text where it never does."""
    ends = time.monotonic() + limit_s
    while not browser.execute_script(script):
        assert time.monotonic() < ends, (
            f"{script} never came true:\n{browser.find_element('css selector', 'body').text[:2000]}"
        )
        time.sleep(0.02)


def texts(browser: Any, selector: str) -> list[str]:
    return [element.text for element in browser.find_elements("css selector", selector)]
