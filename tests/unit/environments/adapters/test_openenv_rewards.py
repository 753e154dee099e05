"""Rewards of an OpenEnv server, from one that speaks its messages on this machine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import WSMsgType, web

from rlflow.types import Step
from rlflow_environments.adapters.openenv import OpenEnv, OpenEnvError

ANSWERS: dict[str, dict[str, Any]] = {
    "right": {"observation": {"text": "done"}, "reward": 1.0, "done": True},
    "wrong": {"observation": {"text": "done"}, "reward": 0, "done": True},
    "on": {"observation": {"text": "go on"}, "reward": None, "done": False},
    "no verdict": {
        "observation": {"text": "", "error": "disk\nfull"},
        "reward": None,
        "done": True,
    },
    "text": {"observation": {"text": "said"}, "reward": "1.0", "done": False},
    "nan": {"observation": {"text": "said"}, "reward": float("nan"), "done": True},
}


async def schema(_: web.Request) -> web.Response:
    fields = {"properties": {"command": {"type": "string"}}, "required": ["command"]}
    return web.json_response({"action": fields})


async def session(request: web.Request) -> web.WebSocketResponse:
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    async for message in socket:
        if message.type is not WSMsgType.TEXT:
            continue
        asked = message.json()
        if asked["type"] == "close":
            break
        begun = {"observation": {"text": "Go."}, "reward": None, "done": False}
        data = begun if asked["type"] == "reset" else ANSWERS[asked["data"]["command"]]
        await socket.send_json({"type": "observation", "data": data})
    return socket


@pytest.fixture(scope="module")
def world() -> Iterator[OpenEnv]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    app = web.Application()
    app.add_routes([web.get("/schema", schema), web.get("/ws", session)])
    runner = web.AppRunner(app)

    async def begin() -> int:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return int(runner.addresses[0][1])

    port = asyncio.run_coroutine_threadsafe(begin(), loop).result(20)
    yield OpenEnv(f"http://127.0.0.1:{port}")
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(20)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(20)
    loop.close()


def step(world: OpenEnv, *commands: str) -> Step:
    """The last step of an episode with these commands."""

    async def play() -> Step:
        episode = await world.reset(world.tasks("train")[0])
        try:
            return [await world.step(episode, command) for command in commands][-1]
        finally:
            await world.close(episode)

    return asyncio.run(play())


def test_the_servers_numbers_are_the_rewards(world: OpenEnv) -> None:
    assert (step(world, "right").reward, step(world, "wrong").reward) == (1.0, 0.0)
    ongoing = step(world, "on")
    assert (ongoing.reward, ongoing.terminated) == (0.0, False)
    assert step(world, "on", "right").reward == 1.0


@pytest.mark.parametrize(
    ("command", "told"),
    [("no verdict", "None; it said: disk full"), ("text", "'1.0'"), ("nan", "nan")],
)
def test_an_end_without_a_verdict_is_no_zero(world: OpenEnv, command: str, told: str) -> None:
    """It escapes, so that the episode is left out and counted, with the server's reason."""
    with pytest.raises(OpenEnvError, match=f"expected a number as the reward.*{told}"):
        step(world, command)
