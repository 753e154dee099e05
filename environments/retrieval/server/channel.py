"""Messages, and open connections, between the processes of one server."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import orjson

MAX_MESSAGE = 1 << 17  # a socket's buffer holds more

Message = dict[str, Any]
OnMessage = Callable[[Message, int | None], None]
"""Called with a message and the file descriptor that came with it."""


def channel_pair() -> tuple[Channel, Channel]:
    """Both ends of a channel. It ends when either process closes its end, or ends in whatever way."""
    return tuple(Channel(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))  # type: ignore[return-value]


class Channel:
    """One end: whole messages, in order (AF_UNIX, SOCK_SEQPACKET). A message is JSON with its `kind`."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._loop: asyncio.AbstractEventLoop | None = None

    def fileno(self) -> int:
        """The descriptor, for `select` and for the other process."""
        return self._end.fileno()

    def send(self, kind: str, *, descriptors: Sequence[int] = (), **fields: Any) -> bool:
        """Sends a message, and copies of open file descriptors; False where it is larger than MAX_MESSAGE, and where the other
        end is gone or does not read."""
        data = orjson.dumps({"kind": kind, **fields})
        if len(data) > MAX_MESSAGE:
            return False
        try:
            socket.send_fds(self._end, [data], list(descriptors))
        except OSError:
            return False
        return True

    def receive(self, wait_s: float | None = None) -> tuple[Message, int | None] | None:
        """The next message and its descriptor; None at the end, and after `wait_s` seconds (None: any time) without one."""
        try:
            if self._loop is None:
                self._end.settimeout(wait_s)
            data, descriptors, _, _ = socket.recv_fds(self._end, MAX_MESSAGE, 1)
        except (ConnectionError, TimeoutError):
            return None
        return (orjson.loads(data), descriptors[0] if descriptors else None) if data else None

    def listen(self, on_message: OnMessage, on_end: Callable[[], None]) -> None:
        """Calls back in the running event loop from now on, until the end, which closes the channel."""
        self._end.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._end, self._read, on_message, on_end)

    def close(self) -> None:
        """Ends the channel; nothing happens the second time."""
        if self._loop is not None:
            self._loop.remove_reader(self._end)
            self._loop = None
        self._end.close()

    def _read(self, on_message: OnMessage, on_end: Callable[[], None]) -> None:
        try:
            while self._loop is not None:
                found = self.receive()
                if found is None:
                    self.close()
                    on_end()
                    return
                on_message(*found)
        except BlockingIOError:
            return


def channel_of(descriptor: int) -> Channel:
    """The end of a channel that another process handed over."""
    os.set_inheritable(descriptor, False)
    return Channel(socket.socket(fileno=descriptor))
