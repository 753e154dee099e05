"""Pages are lent, kept, and lost; a browser that dies or hangs is replaced. The browser here is a program that speaks the
protocol and has no pages: tests with Chromium are in test_miniwob.py."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from rlflow.errors import MissingPackageError
from rlflow_environments.browser.chromium import BrowserError, find_chromium
from rlflow_environments.browser.pool import Pool, PoolOptions

FAKE = Path(__file__).parent / "fake_chromium.py"


def in_a_pool(work: Callable[[Pool], Awaitable[None]], tmp_path: Path, pages: int = 4) -> None:
    program = tmp_path / "chromium"
    program.write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(FAKE))} "$@"\n'
    )
    program.chmod(0o755)

    async def run() -> None:
        pool = Pool(PoolOptions(str(program), browsers=1, pages=pages, timeout_s=0.5, start_s=30))
        try:
            async with asyncio.timeout(60):
                await work(pool)
        finally:
            await pool.close()

    asyncio.run(run())


def test_a_page_is_kept_for_its_document_and_lost_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three failures of a page, each of which costs the page and not the browser."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def work(pool: Pool) -> None:
        first, other = await pool.take("file:///a"), await pool.take("file:///b")
        assert await first.call("1") == f"{first.session} 1" and first.session != other.session
        assert await first.picture() == "data:image/jpeg;base64,YQ=="
        child, own = first.browser._child, first.browser._folder
        assert child is not None
        variables = Path(f"/proc/{child.pid}/environ").read_bytes()
        assert f"\0TMPDIR={own}\0".encode() in variables
        await pool.give(first)
        await pool.give(other)
        assert await pool.take("file:///b") is other and await pool.take("file:///a") is first
        for script, said in (
            ("loop", "no answer to"),
            ("alert", "opened a dialog: boo"),
            ("throw", "Error: thrown"),
        ):
            page = await pool.take("file:///a")
            with pytest.raises(BrowserError, match=said):
                await page.call(script)
            await pool.give(page)
            assert (await pool.take("file:///a")) is not page
            await pool.give(first) if script == "loop" else None
        assert await other.call("2") == f"{other.session} 2"
        assert (pool.lost_pages, pool.restarts) == (3, 0)

    in_a_pool(work, tmp_path, pages=8)
    assert not list(tmp_path.glob("rlflow-chromium-*")), "its folder was left"


def test_a_browser_that_dies_or_hangs_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its pages fail at once; none is lent again."""
    monkeypatch.setattr("rlflow_environments.browser.pool.ALIVE_S", 0.5)

    async def work(pool: Pool) -> None:
        for script, said in (("die", "it ended"), ("stop", "no answer to")):
            page, beside = await pool.take("file:///a"), await pool.take("file:///b")
            waiting = asyncio.create_task(beside.call("loop"))
            with pytest.raises(BrowserError, match=said):
                await page.call(script)
            with pytest.raises(BrowserError):
                await waiting
            await pool.give(page)
            await pool.give(beside)
            again = await pool.take("file:///a")
            assert again.browser is not page.browser and (await again.call("3")).endswith(" 3")
            await pool.give(again)
        assert pool.restarts == 2

    in_a_pool(work, tmp_path)


def test_a_browser_is_reached_through_a_pipe_alone(tmp_path: Path) -> None:
    """No flag opens a port, and the browser listens nowhere: whoever else is on the machine cannot ask it."""

    async def work(pool: Pool) -> None:
        page = await pool.take("file:///a")
        flags = await page.call("flags")
        assert "--remote-debugging-pipe" in flags
        assert not [flag for flag in flags if "port" in flag or "address" in flag]
        child = page.browser._child
        assert child is not None
        browser = psutil.Process(child.pid)
        assert [one for one in browser.net_connections() if one.status == psutil.CONN_LISTEN] == []
        ends = {number: os.readlink(f"/proc/{child.pid}/fd/{number}") for number in (3, 4)}
        assert all(end.startswith(("socket:", "pipe:")) for end in ends.values())
        assert len(os.listdir(f"/proc/{child.pid}/fd")) == 5  # nothing else of ours
        # What is no message ends the browser with a reason, and the next page has another one
        with pytest.raises(BrowserError, match="no message"):
            await page.call("noise")
        await pool.give(page)
        assert (await (await pool.take("file:///a")).call("5")).endswith(" 5")

    in_a_pool(work, tmp_path)


def test_more_episodes_than_pages_wait_for_one(tmp_path: Path) -> None:
    async def work(pool: Pool) -> None:
        async def episode(number: int) -> str:
            page = await pool.take(f"file:///{number % 3}")
            answer = str(await page.call(str(number)))
            await pool.give(page)
            return answer.split(" ")[1]

        assert await asyncio.gather(*map(episode, range(20))) == list(map(str, range(20)))
        # A call that was cancelled gives its page up, and its place back
        page = await pool.take("file:///0")
        call = asyncio.create_task(page.call("loop"))
        await asyncio.sleep(0.05)
        call.cancel()
        await asyncio.wait([call])
        assert page.failed
        await pool.give(page)
        for _ in range(2):
            await pool.take("file:///1")

    in_a_pool(work, tmp_path, pages=2)


def test_a_browser_that_is_missing_or_does_not_start_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(MissingPackageError, match="apt install chromium"):
        find_chromium("no-such-chromium")

    async def start() -> None:
        await Pool(PoolOptions("false", 1, 1, 1.0, 30.0)).take("file:///a")

    with pytest.raises(BrowserError, match="chromium ended with code 1"):
        asyncio.run(start())
