"""Tools of genuine MCP servers (the package's own server side) over stdio and HTTP, whole and failing."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlflow import check_environment
from rlflow.components import ENVIRONMENT
from rlflow.environment import Environment
from rlflow.errors import ConfigError, MissingPackageError
from rlflow.types import Step
from tests.waiting import until

pytestmark = pytest.mark.slow
SERVER = Path(__file__).parent / "mcp_server.py"
STDIO = f"{sys.executable} {SERVER} stdio"


@pytest.fixture
def data(tmp_path: Path) -> str:
    mcp = pytest.importorskip("mcp", reason="mcp is not installed: pip install 'mcp>=2'")
    if not hasattr(mcp, "Client"):
        pytest.skip("mcp is older than 2")
    rows = [{"prompt": f"What is {number} + 3?", "answer": str(number + 3)} for number in range(4)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(tmp_path / "tasks.jsonl")


@pytest.fixture
def address() -> Iterator[str]:
    with subprocess.Popen(
        [sys.executable, str(SERVER), "http"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}/mcp"
        finally:
            process.kill()


def made(server: str, data: str, **options: Any) -> Environment:
    environment: Environment = ENVIRONMENT.build(
        {"name": "mcp", "server": server, "train": data, **options}
    )
    return environment


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def play(environment: Environment, *responses: str, task: int = 0) -> list[Step]:
    episode, steps = await environment.reset(environment.tasks("train")[task]), []
    try:
        for response in responses:
            episode.turns += 1
            steps.append(await environment.step(episode, response))
    finally:
        await environment.close(episode)
    return steps


def texts(step: Step) -> list[str]:
    return [message["content"] for message in step.observation]  # type: ignore[index]


def plays_whole(environment: Environment) -> None:
    schema = environment.tools[0]["function"]
    assert (schema["name"], schema["description"]) == ("add", "Adds two numbers.")
    assert schema["parameters"]["properties"].keys() == {"a", "b"}

    async def two() -> None:
        adds, remembers = (
            called("add", a=2, b=3),
            called("remember", number=4) + called("remember", number=5),
        )
        steps = await play(environment, adds, remembers, "<answer>3</answer>")
        assert texts(steps[0]) == ["5.0"] and texts(steps[1])[1].endswith("4, 5")
        assert (steps[2].reward, steps[2].terminated, steps[2].metrics["tool_calls"]) == (
            1.0,
            True,
            3.0,
        )
        calls = (called("add", a="x", b=3), called("nope"), called("fail", how="raise"), called("fail", how="long"),
                 called("structure"))  # fmt: skip
        wrong = await play(environment, *calls, "no")
        assert "valid number" in texts(wrong[0])[0] and "the tools are add" in texts(wrong[1])[0]
        assert (
            "Error executing tool fail" in texts(wrong[2])[0]
            and "characters left out" in texts(wrong[3])[0]
        )
        assert texts(wrong[4]) == ['{"né": 3}']
        assert (wrong[5].reward, wrong[5].metrics["tool_errors"]) == (0.0, 3.0)

    asyncio.run(two())


def test_a_program_of_its_own_serves_each_episode(data: str) -> None:
    environment = made(STDIO, data)
    plays_whole(environment)

    async def own() -> None:
        for _ in range(2):  # nothing is left of another episode
            assert texts((await play(environment, called("remember", number=1)))[0]) == ["1"]

    asyncio.run(own())


def test_a_server_over_http_has_a_session_for_each_of_64_episodes(data: str, address: str) -> None:
    environment = made(address, data)
    plays_whole(environment)
    report = check_environment(environment, episodes=4)
    assert report.passed, str(report)

    async def many() -> None:
        responses = (called("wait", seconds=1.0), called("add", a=1, b=3), "<answer>4</answer>")
        plays = await asyncio.gather(
            *(play(environment, *responses, task=number % 4) for number in range(64))
        )
        assert all(texts(steps[1]) == ["4.0"] for steps in plays)
        assert [steps[-1].reward for steps in plays] == [0.0, 1.0, 0.0, 0.0] * 16

    begun = time.monotonic()
    asyncio.run(many())
    assert time.monotonic() - begun < 60.0  # 64 waits of a second, at the same time


@pytest.mark.parametrize("how", ["die", "hang", "flood"])
def test_a_program_that_fails_aborts_the_episode_and_is_gone(data: str, how: str) -> None:
    from rlflow_environments.adapters.mcp.session import McpError

    environment = made(STDIO, data, timeout_s=5.0)
    told = {
        "die": "Connection closed; it said: the last words",
        "hang": "within 5 s",
        "flood": "Connection closed",
    }[how]

    async def fails() -> int:
        episode = await environment.reset(environment.tasks("train")[0])
        step = await environment.step(episode, called("fail", how="child"))
        with pytest.raises(McpError, match=told):
            await environment.step(episode, called("fail", how=how))
        await environment.close(episode)
        return int(texts(step)[0])

    child = asyncio.run(fails())
    until(lambda: not Path(f"/proc/{child}").exists(), within_s=10)


def test_a_server_over_http_that_hangs_or_is_gone_aborts_the_episode(
    data: str, address: str
) -> None:
    from rlflow_environments.adapters.mcp.session import McpError

    environment = made(address, data, timeout_s=2.0, start_s=5.0)

    async def hangs() -> None:
        with pytest.raises(McpError, match="within 2 s"):
            await play(environment, called("wait", seconds=30))
        with pytest.raises(McpError, match="no answer of 'fail'"):
            await play(environment, called("fail", how="die"))
        with pytest.raises(McpError, match="no session"):
            await play(environment, "x")

    asyncio.run(hangs())


def test_what_is_no_server_is_said_in_one_line_before_the_run(data: str) -> None:
    wrong = {
        "no-such-program": "no session: FileNotFoundError",
        f"{sys.executable} -c 'import sys; sys.exit(\"no licence\")'": "it said: no licence",
        f"{sys.executable} -c 'while True: print(1)'": "no session",
        f"{sys.executable} {SERVER} mute": "no session within 4 s",
        "http://127.0.0.1:9/mcp": "no session",
        "'": "No closing quotation",
    }
    for server, told in wrong.items():
        with pytest.raises(ConfigError, match=told) as caught:
            made(server, data, start_s=4.0)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="Did you mean 'add'"):
        made(STDIO, data, only=["ad"])


def test_a_program_gets_no_variable_that_is_not_named(
    data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLFLOW_TEST_SECRET", "x")
    script = 'import os, sys; sys.exit(str(os.environ.get("RLFLOW_TEST_SECRET")))'
    for variables, told in (([], "it said: None"), (["RLFLOW_TEST_SECRET"], "it said: x")):
        with pytest.raises(ConfigError, match=told):
            made(f"{sys.executable} -c '{script}'", data, variables=variables)


def test_a_missing_package_is_one_line(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(MissingPackageError, match="pip install 'mcp>=2'"):
        made(STDIO, data)
