"""Messages over sockets: four bytes of length, big-endian, then the message; and, between machines,
who is at the other end.

    accepting -> calling   32 random bytes, A
    calling -> accepting   32 random bytes, B; HMAC-SHA256(key, "calling" A B)
    accepting -> calling   HMAC-SHA256(key, "accepting" A B)
    either way             frames: length of the message, HMAC-SHA256(session, number of the frame (8 bytes) message), message;
                           session = HMAC-SHA256(key, "session" A B) from who called, "answers" in place of "session" to him

What was recorded fits no other connection, as A and B never come again. Messages are not encrypted:
across networks that others can read, use a tunnel. Imported by vLLM's interpreter too: standard
library only. Nothing that is received can run code."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
import struct
from collections.abc import Mapping
from typing import Any

LENGTH = struct.Struct(">I")
# Bytes of a message; the longest prompt that anybody sends has a thousandth of it
LARGEST = 1 << 28
NONCE = MAC = 32  # bytes
LEAST_KEY = 16  # bytes


class FrameError(Exception):
    """What came over the connection is no message, or not from who shares the key."""


# --- messages -------------------------------------------------------------------------------------
# --------------------


def encode(message: Mapping[str, Any]) -> bytes:
    """A JSON message with its length. Raises FrameError for one that is too long."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > LARGEST:
        raise FrameError(f"a message of {len(body)} bytes; at most {LARGEST} are sent at a time.")
    return LENGTH.pack(len(body)) + body


def decode(body: bytes) -> dict[str, Any]:
    """The JSON object of a message. Raises FrameError."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"expected JSON, found {body[:60]!r} ({type(error).__name__}).") from None
    if not isinstance(message, dict):
        raise FrameError(f"expected a JSON object, found {body[:60]!r}.")
    return message


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """The next message; None where the other side has closed the connection, in a message too.
    Raises FrameError."""
    head = exactly(connection, LENGTH.size)
    body = None if head is None else exactly(connection, length_in(head))
    return None if body is None else decode(body)


async def receive_async(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """As `receive`, from a stream."""
    try:
        return decode(await reader.readexactly(length_in(await reader.readexactly(LENGTH.size))))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def exactly(connection: socket.socket, count: int) -> bytes | None:
    """The next `count` bytes; None where the connection ends before."""
    content = bytearray(count)
    view = memoryview(content)
    while view:
        got = connection.recv_into(view)
        if got == 0:
            return None
        view = view[got:]
    return bytes(content)


def length_in(head: bytes, largest: int = LARGEST) -> int:
    """The length that a message begins with. Raises FrameError for more than `largest` bytes."""
    (length,) = LENGTH.unpack(head)
    if length > largest:
        raise FrameError(f"expected a message of at most {largest} bytes, found one of {length}.")
    return int(length)


# --- who is at the other end
# ------------------------------------------------------------------------------------------


class Seal:
    """Numbers and signs the frames of one direction of a connection."""

    def __init__(self, session: bytes) -> None:
        self._session = session
        self._number = 0

    def frame(self, message: bytes) -> bytes:
        """The next frame."""
        return LENGTH.pack(len(message)) + self._mac(message) + message

    def check(self, mac: bytes, message: bytes) -> None:
        """Raises FrameError unless this is the next message that the other side has signed."""
        if not hmac.compare_digest(mac, self._mac(message)):
            raise FrameError("a message that was changed")

    def _mac(self, message: bytes) -> bytes:
        self._number += 1
        return hmac.digest(self._session, (self._number - 1).to_bytes(8, "big") + message, "sha256")


class Accepting:
    """The side that was called: sends `challenge`, reads NONCE + MAC bytes, sends what `answer`
    makes of them."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.challenge = secrets.token_bytes(NONCE)
        self._both = b""

    def answer(self, response: bytes) -> bytes:
        """Raises FrameError where the other side has another key."""
        self._both = self.challenge + response[:NONCE]
        _check_key(response[NONCE:], _mac(self._key, b"calling", self._both))
        return _mac(self._key, b"accepting", self._both)

    def seals(self) -> tuple[Seal, Seal]:
        """(of what comes, of what goes)"""
        return _seals(self._key, self._both)


class Calling:
    """The side that calls: reads NONCE bytes, sends what `respond` makes of them, reads MAC
    bytes."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._both = b""

    def respond(self, challenge: bytes) -> bytes:
        """What proves that this side has the key."""
        second = secrets.token_bytes(NONCE)
        self._both = challenge + second
        return second + _mac(self._key, b"calling", self._both)

    def confirm(self, mac: bytes) -> None:
        """Raises FrameError where the other side has another key."""
        _check_key(mac, _mac(self._key, b"accepting", self._both))

    def seals(self) -> tuple[Seal, Seal]:
        """(of what comes, of what goes)"""
        outward, back = _seals(self._key, self._both)
        return back, outward


def _seals(key: bytes, both: bytes) -> tuple[Seal, Seal]:
    return Seal(_mac(key, b"session", both)), Seal(_mac(key, b"answers", both))


def _mac(key: bytes, label: bytes, both: bytes) -> bytes:
    return hmac.digest(key, label + both, "sha256")


def _check_key(found: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(found, expected):
        raise FrameError("another key")
