"""Clients that say nothing, or hang up: the endpoint lets them go, and answers others meanwhile."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("starlette")

from rlflow_environments.common import connections
from rlflow_environments.endpoint import AgentSession
from rlflow_environments.endpoint.endpoint import Endpoint


def test_a_connection_whose_request_is_never_whole_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "WHOLE_REQUEST_S", 0.3)
    head = b"POST /episodes/x/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 40\r\n\r\n"

    async def scenario() -> tuple[list[bytes], bytes]:
        endpoint = Endpoint()
        await endpoint.start()
        try:
            port = endpoint._port
            quiet = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            for (_, writer), sent in zip(
                quiet, (b"", b"POST /epi", head + b'{"model"'), strict=True
            ):
                writer.write(sent)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head + b"{" + b" " * 38 + b"}")
            answered = await asyncio.wait_for(reader.read(65536), 5)
            ended = [await asyncio.wait_for(reader.read(), 5) for reader, _ in quiet]
            writer.close()
            return ended, answered
        finally:
            await endpoint.stop()

    ended, answered = asyncio.run(scenario())
    assert answered.startswith(b"HTTP/1.1 401") and not any(b"200" in one for one in ended)


def test_requests_whose_clients_hang_up_leave_nothing_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Before their turn, in the middle of a body, and with a stream asked for: no task, no line, no turn."""
    body = b'{"messages": [{"role": "user", "content": "x"}], "stream": true}'

    async def scenario() -> None:
        endpoint, session = Endpoint(), AgentSession()
        await endpoint.start()
        try:
            endpoint.open(session)
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.key}\r\n"
            before = len(asyncio.all_tasks())
            writers = []
            for number in range(12):
                _, writer = await asyncio.open_connection("127.0.0.1", endpoint._port)
                sent = body if number % 2 else body[:20]
                writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + sent)
                writers.append(writer)
            async with asyncio.timeout(5):
                while len(asyncio.all_tasks()) < before + 12 or len(session._waiting) < 6:
                    await asyncio.sleep(0.01)
                for writer in writers:
                    writer.close()
                while endpoint.abandoned < 12 or len(asyncio.all_tasks()) > before:
                    await asyncio.sleep(0.01)
            assert not session._waiting and not session._awaited
            assert not any(asked.request.messages for asked in session._newest)
        finally:
            await endpoint.stop()

    asyncio.run(scenario())
    assert not caplog.records
