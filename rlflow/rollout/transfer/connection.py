"""A connection whose both ends have proved that they share the key. Messages are signed; tensors
follow them as they are."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Mapping
from typing import Any

from rlflow.errors import ConfigError
from rlflow.rollout.frames import (
    LENGTH,
    MAC,
    NONCE,
    Accepting,
    Calling,
    FrameError,
    decode,
    length_in,
)

MOST_BYTES = 2**26  # of a message: the manifest of a model with 100,000 tensors
SLOWEST = 2**23  # bytes a second
SCHEME = "tcp://"


class Connection:
    """Each step of sending and receiving takes `timeout_s` at most, all of them end at `deadline`
    (time.monotonic).

    Raises OSError and FrameError."""

    deadline = float("inf")

    def __init__(self, link: socket.socket, timeout_s: float, most_bytes: int = MOST_BYTES) -> None:
        self.socket = link
        self._most = most_bytes
        link.settimeout(timeout_s)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A machine that is gone says nothing
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            ("TCP_KEEPIDLE", timeout_s / 4),
            ("TCP_KEEPINTVL", timeout_s / 4),
            ("TCP_KEEPCNT", 3),
        ):
            if hasattr(socket, option):
                link.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), max(1, int(value)))

    def accept(self, key: bytes) -> None:
        """The handshake of the side that was called."""
        handshake = Accepting(key)
        self.socket.sendall(handshake.challenge)
        self.socket.sendall(handshake.answer(self.take(NONCE + MAC)))
        self._comes, self._goes = handshake.seals()

    def call(self, key: bytes) -> None:
        """The handshake of the side that calls."""
        handshake = Calling(key)
        self.socket.sendall(handshake.respond(self.take(NONCE)))
        handshake.confirm(self.take(MAC))
        self._comes, self._goes = handshake.seals()

    def send(self, message: Mapping[str, Any] | bytes) -> None:
        """Sends a message: a JSON object, or bytes."""
        content = (
            message
            if isinstance(message, bytes)
            else json.dumps(message, separators=(",", ":")).encode()
        )
        self.socket.sendall(self._goes.frame(content))

    def receive(self) -> dict[str, Any]:
        """The next message, a JSON object."""
        return decode(self.receive_bytes())

    def receive_bytes(self) -> bytes:
        """The next message."""
        length = length_in(self.take(LENGTH.size), self._most)
        mac, message = self.take(MAC), self.take(length)
        self._comes.check(mac, message)
        return message

    def take(self, count: int) -> bytes:
        """The next bytes, whatever they are."""
        content = bytearray(count)
        self.fill(memoryview(content))
        return bytes(content)

    def fill(self, view: memoryview) -> None:
        """The next bytes, into `view`."""
        while view:
            if time.monotonic() > self.deadline:
                raise TimeoutError("too slow")
            got = self.socket.recv_into(view)
            if got == 0:
                raise FrameError("the other side has closed the connection")
            view = view[got:]

    def hang_up(self) -> None:
        """Ends whatever another thread sends or receives here."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket."""
        self.socket.close()


def deadline_s(size: int, timeout_s: float) -> float:
    """Seconds that a version of `size` bytes may take, over which whoever is slow for long is cut
    off."""
    return 2 * timeout_s + size / SLOWEST


def host_and_port(text: str, where: str) -> tuple[str, int]:
    """Of host:port. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ConfigError(f"{where}: expected an address host:port, found '{text}'.")
    return host.strip("[]"), int(port)
