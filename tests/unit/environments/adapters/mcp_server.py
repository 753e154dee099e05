"""A server of the package mcp with tools that add, remember, and fail in every way. `stdio`, or `http`, which prints its port."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import anyio
import uvicorn
from mcp.server import MCPServer
from mcp.types import CallToolResult

server = MCPServer("sums")
numbers: list[float] = []


@server.tool()
def add(a: float, b: float) -> float:
    """Adds two numbers."""
    return a + b


@server.tool()
def remember(number: float) -> str:
    """Remembers a number; says all that this server remembers."""
    numbers.append(number)
    return ", ".join(f"{one:g}" for one in numbers)


@server.tool()
def fail(how: str) -> str:
    """raise, die, hang, flood, long, junk or child."""
    if how == "raise":
        raise RuntimeError("out of luck")
    if how == "die":
        print("the last words", file=sys.stderr, flush=True)
        os._exit(3)
    if how == "child":
        child = subprocess.Popen(["sleep", "300"])
        os.environ["CHILD"] = str(child.pid)
        return str(child.pid)
    if how == "long":
        return "x" * 100_000
    if how == "flood":
        return "x" * 20_000_000
    if how == "junk":
        for _ in range(200_000):
            os.write(1, b"no message\n" * 100)
    time.sleep(60)
    return "late"


@server.tool()
def structure() -> CallToolResult:
    """A result without a text."""
    return CallToolResult(content=[], structured_content={"né": 3})


@server.tool()
async def wait(seconds: float) -> str:
    """Waits."""
    await anyio.sleep(seconds)
    return "waited"


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    elif sys.argv[1] == "mute":
        time.sleep(60)
    else:
        listener = socket.create_server(("127.0.0.1", 0))
        print(listener.getsockname()[1], flush=True)
        uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="warning")).run(
            sockets=[listener]
        )
