"""Connections that end: a client that goes quiet, or away without a word, holds none for ever."""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

logger = logging.getLogger(__name__)

WHOLE_REQUEST_S = 30.0
FILES_WANTED = 65_536


class JoiningTransport:
    """A transport that sends at once what is written one after the other: the head of an answer and
    its body in one packet, so that the client wakes up once."""

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Sends it soon."""
        if not self._parts:
            self._loop.call_soon(self.flush)
        self._parts.append(data)

    def flush(self) -> None:
        """Sends it now."""
        if self._parts:
            self._transport.write(b"".join(self._parts))
            self._parts.clear()

    def close(self) -> None:
        """Closes the connection when everything is sent."""
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class ImpatientProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which closes a connection whose next request is not whole WHOLE_REQUEST_S
    after its first byte, or after the connection was made. uvicorn itself has a limit only between
    an answer and the next byte."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(JoiningTransport(transport, self.loop))  # type: ignore[arg-type]
        self.app.connections = self.connections  # type: ignore[attr-defined]
        self._await_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.parser is None or (
            self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        ):
            self._forget()  # whole, and being answered
        else:
            self._await_request()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._forget()

    def on_response_complete(self) -> None:
        self.transport.flush()  # type: ignore[attr-defined]
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _await_request(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(WHOLE_REQUEST_S, self._expire)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        self._deadline = None
        self.transport.close()


def allow_many_files() -> None:
    """Raises this process's limit of open files, of which each connection is one, as far as it may;
    says so where that is little."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_WANTED if hard == resource.RLIM_INFINITY else min(FILES_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft != resource.RLIM_INFINITY and soft < 4096:
        logger.warning(
            "only %d files may be open at a time, one per connection: raise `ulimit -Hn` for more "
            "clients",
            soft,
        )
