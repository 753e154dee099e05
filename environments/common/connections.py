"""Connections of uvicorn's servers that end: a client that goes quiet holds none for ever."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

WHOLE_REQUEST_S = 30.0
ON_THE_WAY_S = 1.0


class ImpatientProtocol(HttpToolsProtocol):
    """uvicorn's, which closes a connection whose next request is not whole WHOLE_REQUEST_S after
    its first byte, or after the connection was made: each one takes a file, of which a process has
    few. uvicorn itself has a limit only between an answer and the next byte.

    At the end of its process an idle one is closed a moment later: a request may be on its way. The
    application may count connections."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.app.connections = self.connections
        self._await_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            self._await_request()
        else:
            self._forget()  # whole, and being answered

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._forget()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        answered = self.cycle is None or self.cycle.response_complete
        self.loop.call_later(ON_THE_WAY_S if answered else 0, super().shutdown)

    def _await_request(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(WHOLE_REQUEST_S, self.transport.close)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
