"""Clients that connect and say nothing: the endpoint lets them go, and answers others meanwhile."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("starlette")

from rlflow import connections
from rlflow.endpoint.endpoint import Endpoint


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
