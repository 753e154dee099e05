"""Deadlines of calls count the time in which this process runs."""

from __future__ import annotations

import asyncio
import time

import pytest

from rlflow.errors import RolloutError
from rlflow.net.calls import RunningTime, deadline


def test_a_gap_counts_as_two_turns_at_most() -> None:
    now = [100.0]
    running = RunningTime(0.5, lambda: now[0])
    for moment, expected in ((100.25, 0.25), (101.0, 1.0), (4600.0, 2.0), (4600.5, 2.5)):
        now[0] = moment
        assert running.look() == expected


def test_a_deadline_ends_what_is_awaited_in_time_and_names_it() -> None:
    async def hang() -> None:
        async with deadline(0.2, "the call"):
            await asyncio.sleep(60)

    began = time.monotonic()
    with pytest.raises(RolloutError, match=r"^the call did not end within 0\.2 s$"):
        asyncio.run(hang())
    assert 0.2 <= time.monotonic() - began < 10


def test_a_process_that_stood_still_for_longer_than_a_deadline_does_not_break_it() -> None:
    async def wait() -> str:
        async with deadline(0.4, "the call"):
            asyncio.get_running_loop().call_later(
                0.05, time.sleep, 1.0
            )  # as a stopped process: nothing of it runs
            await asyncio.sleep(0.2)
            return "ended"

    assert asyncio.run(wait()) == "ended"


def test_a_timeout_of_the_callers_own_stays_what_it_is() -> None:
    async def time_out() -> None:
        async with deadline(5.0, "the call"):
            raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        asyncio.run(time_out())
