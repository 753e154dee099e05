"""What a server of MCP cannot do: list tools without end, send bodies without end, leave programs behind. By
a client that answers as the package's does, and by the package itself where it is installed."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlflow_environments.adapters.mcp.session import (
    LONGEST_MESSAGE,
    MARK,
    McpError,
    McpSession,
    Server,
    start_program,
)
from tests.waiting import until


def tool(name: str = "add", description: str = "") -> Any:
    return SimpleNamespace(name=name, description=description, input_schema={})


def listed(page: Callable[[int], tuple[list[Any], str | None]], start_s: float = 5.0) -> list[Any]:
    """The tools of a server whose nth list is `page(n)`."""
    session = McpSession(Server("sums", (), {}, {}, timeout_s=5.0, start_s=start_s))
    asked = 0

    async def list_tools(cursor: str | None) -> Any:
        nonlocal asked
        asked += 1
        assert asked < 5_000
        await asyncio.sleep(0)
        found, following = page(asked)
        return SimpleNamespace(tools=found, next_cursor=following)

    session._client = SimpleNamespace(list_tools=list_tools)
    return asyncio.run(session.tools())


def test_a_list_of_tools_of_several_pages_is_read_to_its_end() -> None:
    names = [one.name for one in listed(lambda n: ([tool(f"t{n}")], "more" if n < 20 else None))]
    assert names == [f"t{number}" for number in range(1, 21)]


@pytest.mark.parametrize(
    "page",
    [
        lambda n: ([], "more"),
        lambda n: ([tool()], "more"),
        lambda n: ([tool()] * 2_000, None),
        lambda n: ([tool(description="x" * 300_000)], "more"),
    ],
    ids=["empty pages", "pages", "tools", "descriptions"],
)
def test_a_list_of_tools_without_end_is_refused(page: Any) -> None:
    with pytest.raises(McpError, match="list of tools is too long"):
        listed(page)


def test_slow_pages_end_with_the_time_of_a_start() -> None:
    def slow(number: int) -> tuple[list[Any], str]:
        threading.Event().wait(0.02)
        return [], "more"

    with pytest.raises(McpError, match=r"no end after 0\.1 s"):
        listed(slow, start_s=0.1)


@pytest.mark.parametrize("name", ["", "a\x1b[2J", "a\nb", "x" * 200])
def test_a_name_of_a_tool_is_a_short_word(name: str) -> None:
    with pytest.raises(McpError) as caught:
        listed(lambda n: ([tool(name)], None))
    assert str(caught.value).isprintable()


DRIVER = """
import asyncio, os, sys
from rlflow_environments.adapters.mcp.session import MARK, Server, start_program
script = "import subprocess, sys; print(subprocess.Popen(['sleep', '300'], start_new_session=True).pid, flush=True); sys.stdin.read(); import time; time.sleep(300)"
async def main():
    server = Server("x", (sys.executable, "-I", "-S", "-c", script), {}, {MARK: sys.argv[1]}, 5.0, 5.0)
    guard = server.guard()
    process = await start_program(server)
    child = (await process.stdout.readline()).decode().strip()
    print(process.pid, child, flush=True)
    await asyncio.sleep(300)
asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the guard is Linux's")
def test_programs_end_with_a_driver_that_is_killed() -> None:
    """With what they started, in sessions of their own, though they ignore the end of their stdin."""
    command = [sys.executable, "-c", DRIVER, f"test-{os.getpid()}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        programs = [Path(f"/proc/{pid}") for pid in driver.stdout.readline().split()]
        assert len(programs) == 2 and all(place.exists() for place in programs)
        driver.send_signal(signal.SIGKILL)
    until(lambda: not any(place.exists() for place in programs), within_s=20)


@contextmanager
def server_sending(head: str, part: bytes) -> Iterator[tuple[str, list[int]]]:
    """(address of a server that answers every request with parts without end, [bytes that it got rid of])."""
    sent = [0]
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer(client: socket.socket) -> None:
            with client:
                client.recv(1 << 16)
                client.sendall(f"HTTP/1.1 200 OK\r\n{head}\r\n\r\n".encode())
                try:
                    while sent[0] < 1 << 30:
                        client.sendall(part)
                        sent[0] += len(part)
                except OSError:
                    pass

        def accept() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(client,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp", sent
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["application/json", "text/event-stream", "text/html", "gzip"])
def test_a_body_without_end_is_ended(kind: str) -> None:
    mcp = pytest.importorskip("mcp", reason="mcp is not installed: pip install 'mcp>=2'")
    if not hasattr(mcp, "Client"):
        pytest.skip("mcp is older than 2")
    head, part = f"Content-Type: {kind}", b" " * (1 << 20)
    if kind == "text/event-stream":
        part = b": a comment\n" * (1 << 16)
    if kind == "gzip":  # a bomb: it is not unpacked
        zlib = importlib.import_module("zlib")
        head = "Content-Type: application/json\r\nContent-Encoding: gzip"
        part = zlib.compress(b" " * (1 << 20), wbits=31)
    with server_sending(head, part) as (address, sent):
        session = McpSession(Server(address, (), {}, {}, timeout_s=20.0, start_s=20.0))
        with pytest.raises(McpError):
            asyncio.run(session.open())
    assert sent[0] < (64 << 20) + 40 * LONGEST_MESSAGE


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the guard is Linux's")
def test_a_guard_looks_for_the_mark_that_programs_are_started_with() -> None:
    async def started() -> bytes:
        server = Server("x", ("sleep", "60"), {}, {MARK: "mine"}, 1.0, 1.0)
        process, guard = await start_program(server), server.guard()
        try:
            assert guard is not None and guard._process is not None
            assert f"{MARK}=mine" in guard._process.args
            return Path(f"/proc/{process.pid}/environ").read_bytes()
        finally:
            process.kill()
            await process.communicate()
            guard.close()

    assert f"{MARK}=mine".encode() in asyncio.run(started()).split(b"\0")
    assert Server("http://x", (), {}, {}, 1.0, 1.0).guard() is None
