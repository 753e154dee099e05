from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading

import pytest

from rlflow.rollout.event_loop import LoopThread, settle


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


def test_as_many_plain_functions_wait_in_it_at_once_as_there_are_agents() -> None:
    thread, all_there = LoopThread("test"), threading.Barrier(64)

    async def wait_for_others() -> None:
        await asyncio.gather(*(asyncio.to_thread(all_there.wait, 5.0) for _ in range(64)))

    thread.run(wait_for_others())
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


def test_what_takes_several_turns_takes_one_step_of_who_computes_in_the_loop() -> None:
    async def over_a_socket() -> None:
        loop = asyncio.get_running_loop()
        here, there = socket.socketpair()
        with here, there:
            for end in (here, there):
                end.setblocking(False)
            for _ in range(3):
                reading = asyncio.ensure_future(loop.sock_recv(there, 8))
                await asyncio.sleep(0)  # it waits
                await loop.sock_sendall(here, b"asked")
                assert await reading == b"asked"

    async def both() -> int:
        asked, steps = asyncio.ensure_future(over_a_socket()), 0
        while not asked.done():
            steps += 1
            await settle()
        await asked
        return steps

    async def beside_one_that_never_rests() -> None:
        async def restless() -> None:
            while True:
                await asyncio.sleep(0)

        task = asyncio.ensure_future(restless())
        await asyncio.wait_for(settle(), 5)
        task.cancel()

    assert asyncio.run(both()) == 1
    asyncio.run(beside_one_that_never_rests())
