"""Connections that another process may take over, between two of their requests."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable
from typing import Any

from rlflow_environments.retrieval.server.connections import ImpatientProtocol

AGAIN_S = 0.05


class Movers:
    """The connections of this process, and where they go. Nothing is lost: a request that was begun is answered here, the next
    one is read by the process that takes the connection over."""

    def __init__(self) -> None:
        self.held: set[MovingProtocol] = set()
        self._take: Callable[[int], bool] | None = None
        self._count = 0.0

    def go(self, take: Callable[[int], bool], count: float = math.inf) -> None:
        """From now on, as soon as they have nothing under way, `count` connections are offered to `take`, by their file
        descriptors, and leave where it returns True."""
        self._take, self._count = take, count
        for connection in list(self.held):
            connection.move()

    @property
    def going(self) -> bool:
        """Whether further connections are to leave."""
        return self._count > 0

    def offer(self, descriptor: int) -> bool:
        """Whether the connection was taken over."""
        taken = self._count > 0 and self._take is not None and self._take(descriptor)
        self._count -= taken
        return taken


class MovingProtocol(ImpatientProtocol):
    """One connection. What its client sends while it waits to leave stays in the socket."""

    def __init__(self, *args: Any, movers: Movers, **options: Any) -> None:
        super().__init__(*args, **options)
        self._movers = movers
        self._held = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._movers.held.add(self)
        self.move()

    def connection_lost(self, exc: Exception | None) -> None:
        self._movers.held.discard(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._movers.going and self._idle():
            self._hold(True)
            self.loop.call_soon(self.move)  # when the answer is written

    def move(self) -> None:
        """Leaves, where nothing is under way and somebody takes the connection."""
        if self not in self._movers.held:
            return
        leaves = self._movers.going and self._idle()
        if leaves and self.transport.get_write_buffer_size():
            self._hold(True)
            self.loop.call_later(AGAIN_S, self.move)
        elif leaves and self._movers.offer(self.transport.get_extra_info("socket").fileno()):
            self._movers.held.discard(self)
            self.transport.abort()  # closes this process's descriptor only
        else:
            self._hold(False)

    def _hold(self, held: bool) -> None:
        """Leaves what the client sends next in the socket, or no longer."""
        if held != self._held and not self.transport.is_closing():
            (self.transport.pause_reading if held else self.transport.resume_reading)()
        self._held = held

    def _idle(self) -> bool:
        answered = self.cycle is None or self.cycle.response_complete
        return answered and not self.pipeline and not self.begun and not self.transport.is_closing()


async def take_over(descriptor: int, make: Callable[[], asyncio.Protocol]) -> None:
    """Goes on with a connection that another process had. make: its protocol."""
    connection = socket.socket(fileno=descriptor)
    connection.setblocking(False)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # see `listener.bind`
        await asyncio.get_running_loop().connect_accepted_socket(make, connection)
    except OSError:  # its client went away meanwhile
        connection.close()
