"""A session of an MCP server: a program of its own per episode, or one of a server over HTTP.

The package `mcp` speaks; what it leaves open is bounded here: the length of a message and of a
body, the number of messages and of pages, what a program writes to stderr, every wait, and a
program's life."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from rlflow.errors import RLFlowError, described
from rlflow.storage.child import Guard
from rlflow.texts import LONGEST_NAME, one_line
from rlflow_environments.tool_use.environment import ToolCallError

LONGEST_MESSAGE = 4 << 20  # bytes
LONGEST_STREAM = 64 << 20  # bytes of a body that is a stream of messages
MOST_OTHER_LINES = 1_000  # on stdout, that are no messages: what a program prints by mistake
MOST_NOTICES = 10_000  # of a session: messages that answer nothing
MARK = "RLFLOW_MCP"
"""Variable by which the programs of one environment are known."""
MOST_PAGES = 100  # of a list of tools
MOST_TOOLS = 1_000
LONGEST_TOOLS = 1 << 20  # characters of all descriptions and schemas: a prompt holds them
LAST_WORDS = 500  # characters of what a program wrote to stderr
END_S = 1.0  # for a program whose stdin was closed, as the protocol has it


class McpError(RLFlowError):
    """The server failed, or is gone: the episode is aborted, neither good nor bad."""


@dataclass(frozen=True)
class Server:
    """Where sessions come from. command: of a program, whose words are none for a url. headers: of
    every request. timeout_s, start_s: of an answer, and until a session is there."""

    name: str
    command: tuple[str, ...]
    headers: dict[str, str]
    variables: dict[str, str]
    timeout_s: float
    start_s: float

    def guard(self) -> Guard | None:
        """Ends what is left of its programs, once this process has ended: they have the mark in
        their environment."""
        return Guard(f"{MARK}={self.variables[MARK]}") if self.command else None


class McpSession:
    """A connection, held by a task of its own: the package wants one task to open and close it."""

    def __init__(self, server: Server) -> None:
        self._server, self._said = server, bytearray()
        self._closing = asyncio.Event()
        self._holder: asyncio.Task[None] | None = None
        self._client: Any = None

    async def open(self) -> McpSession:
        """Connects. Raises McpError."""
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._holder = asyncio.create_task(self._hold(ready))
        try:
            async with asyncio.timeout(self._server.start_s):
                self._client = await ready
        except TimeoutError:
            await self.close()
            raise self._failure(f"no session within {self._server.start_s:g} s") from None
        except BaseException as problem:
            await self.close()
            if isinstance(problem, Exception):
                raise self._failure(f"no session: {_innermost(problem)}") from None
            raise
        return self

    async def tools(self) -> list[Any]:
        """All tools of the server, as the package has them. Raises McpError, also where they have
        no end."""
        found: list[Any] = []
        size, cursor = 0, None
        try:
            async with asyncio.timeout(self._server.start_s):
                for _ in range(MOST_PAGES):
                    page = await self._ask(self._client.list_tools(cursor=cursor), "list of tools")
                    found += page.tools
                    size += sum(map(_size_of, page.tools))
                    cursor = page.next_cursor
                    if not cursor or len(found) > MOST_TOOLS or size > LONGEST_TOOLS:
                        break
        except TimeoutError:
            limit_s = self._server.start_s
            raise self._failure(f"its list of tools has no end after {limit_s:g} s") from None
        if cursor or len(found) > MOST_TOOLS or size > LONGEST_TOOLS:
            most = f"{MOST_TOOLS} tools, {MOST_PAGES} pages, {LONGEST_TOOLS:,} characters"
            raise self._failure(f"its list of tools is too long; expected at most {most}")
        for tool in found:
            if not tool.name.isprintable() or not 0 < len(tool.name) <= LONGEST_NAME:
                raise self._failure(f"a tool has the name {one_line(repr(tool.name), 60)}")
        return found

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """The text of a result. Raises ToolCallError where the tool says that it failed, or was
        called wrongly; McpError."""
        result = await self._ask(self._client.call_tool(name, arguments), f"answer of '{name}'")
        text = "\n".join(_text(block) for block in result.content)
        if not result.content and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        if result.is_error:
            raise ToolCallError(text if text.startswith("Error") else f"Error: {text}")
        return text

    async def close(self) -> None:
        """Ends the session and, where it has one, its program."""
        self._closing.set()
        if self._holder is not None:
            if not self._client:  # it may still wait for a server that never answers
                self._holder.cancel()
            await asyncio.wait([self._holder], timeout=self._server.timeout_s + 3 * END_S)
            self._holder.cancel()

    async def _ask(self, answer: Any, what: str) -> Any:
        try:
            async with asyncio.timeout(self._server.timeout_s):
                return await answer
        except TimeoutError:
            raise self._failure(f"no {what} within {self._server.timeout_s:g} s") from None
        except Exception as problem:  # noqa: BLE001 -- theirs: groups, HTTP's, JSON's
            types = importlib.import_module("mcp.types")
            error = getattr(problem, "error", None)
            if getattr(error, "code", None) == types.INVALID_PARAMS:
                raise ToolCallError(f"Error: {error.message}") from None
            raise self._failure(f"no {what}: {_innermost(problem)}") from None

    async def _hold(self, ready: asyncio.Future[Any]) -> None:
        mcp, server = importlib.import_module("mcp"), self._server
        streams = _program(server, self._said) if server.command else _over_http(server)
        try:
            async with mcp.Client(streams, cache=None) as client:
                if not ready.done():
                    ready.set_result(client)
                await self._closing.wait()
        except BaseException as problem:
            if not ready.done():
                ready.set_exception(
                    problem if isinstance(problem, Exception) else McpError("it was closed")
                )
            elif not isinstance(problem, Exception):
                raise

    def _failure(self, why: str) -> McpError:
        last = one_line(self._said.decode(errors="replace"))[-LAST_WORDS:]
        return McpError(f"{self._server.name}: {why}{f'; it said: {last}' if last else ''}.")


@contextlib.asynccontextmanager
async def _over_http(server: Server) -> AsyncIterator[Any]:
    """The streams of a session over HTTP."""
    transport = importlib.import_module("mcp.client.streamable_http")
    make_client = importlib.import_module("mcp.shared._httpx_utils").create_mcp_http_client
    connect, limit = transport.streamable_http_client, "max_sse_event_size"  # from mcp 2.3 on
    limits = {limit: LONGEST_MESSAGE} if limit in inspect.signature(connect).parameters else {}
    async with (
        make_client(headers={**server.headers, "accept-encoding": "identity"}) as client,
        _bounding(client),
        connect(server.name, http_client=client, **limits) as streams,
    ):
        yield streams


@contextlib.asynccontextmanager
async def _bounding(client: Any) -> AsyncIterator[None]:
    """Ends bodies of the client's responses that are longer than they may be, or compressed: of
    those nobody knows the length."""
    library = importlib.import_module(type(client).__module__.partition(".")[0])

    class Bounded(library.AsyncByteStream):  # type: ignore[name-defined]
        def __init__(self, stream: Any, most: int) -> None:
            self._stream, self._most = stream, most

        async def __aiter__(self) -> AsyncIterator[bytes]:
            left = self._most
            async for part in self._stream:
                left -= len(part)
                if left < 0:
                    raise library.StreamError(f"a body of more than {self._most} bytes")
                yield part

        async def aclose(self) -> None:
            await self._stream.aclose()

    async def bound(response: Any) -> None:
        response.headers.pop("content-encoding", None)  # nobody asked for one: it is not undone
        events = response.headers.get("content-type", "").startswith("text/event-stream")
        most = LONGEST_STREAM if events else LONGEST_MESSAGE
        response.stream = Bounded(response.stream, most)

    client.event_hooks = {**client.event_hooks, "response": [bound]}
    yield


@contextlib.asynccontextmanager
async def _program(server: Server, said: bytearray) -> AsyncIterator[Any]:
    """The streams of a program that speaks a message per line. One that is longer than it may be
    ends the connection, as do many lines that are none."""
    message, types = (
        importlib.import_module(f"mcp.{name}") for name in ("shared.message", "types")
    )
    anyio = importlib.import_module("anyio")
    process = await start_program(server)
    incoming, received = anyio.create_memory_object_stream(0)
    sent, outgoing = anyio.create_memory_object_stream(0)

    async def read() -> None:
        assert process.stdout is not None
        others = notices = 0
        async with incoming:
            # ValueError: a line that is too long
            with contextlib.suppress(ValueError, OSError, anyio.BrokenResourceError):
                async for line in process.stdout:
                    try:
                        one = types.jsonrpc_message_adapter.validate_json(line, by_name=False)
                    except ValueError:
                        await asyncio.sleep(0)  # others have their turn beside a flood
                        others += 1
                        if others > MOST_OTHER_LINES:
                            return
                    else:
                        notices += hasattr(one, "method")
                        if notices > MOST_NOTICES:
                            return
                        await incoming.send(message.SessionMessage(one))

    async def write() -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError, anyio.EndOfStream):
            async for one in outgoing:
                text = one.message.model_dump_json(by_alias=True, exclude_unset=True)
                process.stdin.write(text.encode() + b"\n")
                await process.stdin.drain()

    tasks = [asyncio.create_task(work) for work in (read(), write(), _listen(process, said))]
    try:
        yield received, sent
    finally:
        await asyncio.shield(_end(process))
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for stream in (incoming, received, sent, outgoing):
            stream.close()


async def start_program(server: Server) -> Process:
    """A program of the server's command, the leader of a group."""
    return await asyncio.create_subprocess_exec(
        *server.command,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env=server.variables,
        limit=LONGEST_MESSAGE,
        start_new_session=True,
    )


async def _listen(process: Process, said: bytearray) -> None:
    """Keeps the end of what a program writes to stderr."""
    assert process.stderr is not None
    while data := await process.stderr.read(1 << 16):
        said += data
        del said[: -8 * LAST_WORDS]


async def _end(process: Process) -> None:
    """Closes its stdin, then ends the program with all that it started."""
    assert process.stdin is not None
    process.stdin.close()
    for number in (0, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await process.wait()
                break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what it left behind
    transport = getattr(process, "_transport", None)  # nothing public closes pipes that are full
    if transport is not None:
        transport.close()


def _size_of(tool: Any) -> int:
    """Characters of a tool in a prompt, about."""
    return len(tool.name) + len(tool.description or "") + len(str(tool.input_schema))


def _text(block: Any) -> str:
    """A part of a result; of what is no text, what it is."""
    if block.type == "text":
        return str(block.text)
    if block.type == "resource" and isinstance(text := getattr(block.resource, "text", None), str):
        return text
    return f"[{block.type}]"


def _innermost(problem: BaseException) -> str:
    """The first error within groups of errors."""
    while isinstance(problem, BaseExceptionGroup):
        problem = problem.exceptions[0]
    return described(problem)
