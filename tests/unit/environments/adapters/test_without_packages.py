"""What the adapters do without the packages they adapt, and the protocol of OpenEnv against a small server of it."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlflow import check_environment
from rlflow.components import ENVIRONMENT
from rlflow.errors import ConfigError, MissingPackageError, RLFlowError
from rlflow_environments.adapters.openenv import OpenEnvError

NAMES = {
    "gymnasium:Taxi-v4": ("gymnasium", "pip install gymnasium"),
    "reasoning_gym:leg_counting": ("reasoning_gym", "pip install reasoning-gym"),
    "verifiers:wordle": ("verifiers", "pip install 'verifiers>=0.4'"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_package_is_one_line_with_the_command(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, command = NAMES[name]
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(MissingPackageError) as caught:
        ENVIRONMENT.build(name)
    assert str(caught.value).endswith(f"not installed: {command}") and "\n" not in str(caught.value)


def test_a_verifiers_before_tasksets_is_refused_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = tmp_path / "verifiers-0.3.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: verifiers\nVersion: 0.3.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingPackageError) as caught:
        ENVIRONMENT.build("verifiers:wordle")
    told = "expected verifiers 0.4 or later, found 0.3.1: pip install 'verifiers>=0.4'"
    assert str(caught.value) == f"environment verifiers: {told}"


class Server:
    """The messages of an OpenEnv server: `sessions` at a time count to two, `broken` after the first step."""

    def __init__(self, sessions: int) -> None:
        self.sessions, self.open, self.most, self.closed = sessions, 0, 0, 0
        self.resets: list[Any] = []
        self.url = ""

    async def schema(self, _: Any) -> Any:
        from aiohttp import web

        number = {"type": "integer", "title": "Number", "description": "what comes next"}
        action = {
            "properties": {"metadata": {"type": "object"}, "number": number},
            "required": ["number"],
        }
        return web.json_response({"action": action, "observation": {}})

    async def socket(self, request: Any) -> Any:
        from aiohttp import web

        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.open >= self.sessions:
            told = {"message": "full", "code": "CAPACITY_REACHED", "max_sessions": self.sessions}
            await socket.send_json({"type": "error", "data": told})
            await socket.close()
            return socket
        self.open += 1
        self.most, count = max(self.most, self.open), 0
        async for message in socket:
            asked = message.json()
            if asked["type"] == "close":
                self.closed += 1
                break
            if asked["type"] == "reset":
                self.resets.append(asked["data"])
                answer = {"observation": {"seen": 0, "metadata": {}}, "reward": None, "done": False}
            elif not str(asked["data"]["number"]).lstrip("-").isdecimal():
                told = {
                    "message": "Invalid message",
                    "code": "VALIDATION_ERROR",
                    "errors": ["no number"],
                }
                await socket.send_json({"type": "error", "data": told})
                continue
            elif asked["data"]["number"] == "666":
                await socket.send_str("no JSON")
                continue
            else:
                count += 1
                right = int(asked["data"]["number"]) == count
                answer = {
                    "observation": {"seen": count, "metadata": {}},
                    "reward": right,
                    "done": count == 2,
                }
            await socket.send_json({"type": "observation", "data": answer})
        self.open -= 1
        return socket


@pytest.fixture
def server() -> Iterator[Server]:
    web = pytest.importorskip("aiohttp.web", reason="aiohttp is not installed: pip install aiohttp")
    made, ready, loop = Server(3), threading.Event(), asyncio.new_event_loop()

    async def start() -> Any:
        app = web.Application()
        app.add_routes([web.get("/schema", made.schema), web.get("/ws", made.socket)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        return runner

    def serve() -> None:
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(10)
    yield made
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


def test_every_episode_has_a_session_of_its_own_waits_for_it_and_gives_it_back(
    server: Server,
) -> None:
    environment = ENVIRONMENT.build({"name": f"openenv:{server.url}", "options": {"level": 2}})
    report = check_environment(environment, episodes=4)
    assert report.passed, str(report)
    assert (server.most, server.open) == (3, 0)  # four episodes at a time, three sessions
    assert server.closed == len(server.resets)
    seeds = {task.answer for task in environment.tasks("train")}
    assert all(data["level"] == 2 and data["seed"] in seeds for data in server.resets)


def test_actions_rewards_and_ends_are_the_servers(server: Server) -> None:
    environment = ENVIRONMENT.build(f"openenv:{server.url}")

    async def play() -> list[Any]:
        episode = await environment.reset(environment.tasks("val")[0])
        assert episode.task.prompt == (
            'Answer with one action per line. An action is {"type": "integer", "description": "what comes next"}.\n{"seen": 0}\n'
        )
        steps = [await environment.step(episode, response) for response in ("1\n", "one\n", "3\n")]
        await environment.close(episode)
        return steps

    first, invalid, last = asyncio.run(play())
    assert (first.observation, first.reward, first.terminated) == ('{"seen": 1}\n', 1.0, False)
    assert (
        invalid.observation == "Not an action: Invalid message ['no number']\n"
        and not invalid.terminated
    )
    assert (last.reward, last.terminated) == (0.0, True)
    assert last.metrics == {"finished": 1.0, "invalid_actions": 1.0}


def test_what_no_server_of_openenv_says_aborts_the_episode(server: Server) -> None:
    environment = ENVIRONMENT.build(
        {"name": f"openenv:{server.url}", "action": {"number": "{response}"}}
    )

    async def play() -> None:
        episode = await environment.reset(environment.tasks("train")[0])
        try:
            await environment.step(episode, "666\n")
        finally:
            await environment.close(episode)

    with pytest.raises(OpenEnvError, match="'step' failed"):
        asyncio.run(play())


def test_an_address_without_a_server_is_said_before_the_run(server: Server) -> None:
    wrong = {
        "openenv:localhost:8000": "expected an address such as http://localhost:8000",
        "openenv:http://127.0.0.1:9": r"none at http://127.0.0.1:9/schema \(no connection",
        f"openenv:{server.url}/elsewhere": "404",
    }
    for name, told in wrong.items():
        with pytest.raises(ConfigError, match=told) as caught:
            ENVIRONMENT.build(name)
        assert isinstance(caught.value, RLFlowError) and "\n" not in str(caught.value)
