from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from rlflow.rollout.event_loop import LoopThread


def test_it_returns_results_and_raises_errors_inside_a_running_loop_too() -> None:
    thread = LoopThread("test")

    async def divide(by: int) -> float:
        await asyncio.sleep(0)
        return 1 / by

    async def cell() -> float:
        return thread.run(divide(2))

    assert thread.run(divide(4)) == 0.25
    assert asyncio.run(cell()) == 0.5
    with pytest.raises(ZeroDivisionError):
        thread.run(divide(0))
    thread.close()


def test_an_interrupt_cancels_what_runs_and_waits_for_its_clean_up() -> None:
    thread = LoopThread("test")
    closed: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            closed.append("yes")

    timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        thread.run(forever())
    assert closed == ["yes"]
    thread.close()
