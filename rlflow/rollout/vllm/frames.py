"""Messages between an engine and its vLLM process: four bytes of length, little-endian, then a JSON object in UTF-8.

Imported by both interpreters: standard library only. Nothing that is received can run code."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

LENGTH = struct.Struct("<I")
LARGEST = 1 << 28  # bytes of a message; the longest prompt that anybody sends has a thousandth of it


class NoMessageError(Exception):
    """What came over the connection is no message."""


def encode(message: Mapping[str, Any]) -> bytes:
    """The bytes of a message. Raises NoMessageError for one that is too long."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > LARGEST:
        raise NoMessageError(f"a message of {len(body)} bytes; at most {LARGEST} are sent at a time.")
    return LENGTH.pack(len(body)) + body


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """The next message; None where the other side has closed the connection, in a message too. Raises NoMessageError."""
    head = _exactly(connection, LENGTH.size)
    body = None if head is None else _exactly(connection, _length(head))
    return None if body is None else _decode(body)


async def receive_async(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """As `receive`, from a stream."""
    try:
        return _decode(await reader.readexactly(_length(await reader.readexactly(LENGTH.size))))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    content = bytearray(count)
    view = memoryview(content)
    while view:
        got = connection.recv_into(view)
        if got == 0:
            return None
        view = view[got:]
    return bytes(content)


def _length(head: bytes) -> int:
    (length,) = LENGTH.unpack(head)
    if length > LARGEST:
        raise NoMessageError(f"expected a message of at most {LARGEST} bytes, found one of {length}.")
    return int(length)


def _decode(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise NoMessageError(f"expected JSON, found {body[:60]!r} ({type(error).__name__}).") from None
    if not isinstance(message, dict):
        raise NoMessageError(f"expected a JSON object, found {body[:60]!r}.")
    return message
