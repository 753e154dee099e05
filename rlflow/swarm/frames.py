"""Frames between peers that share a key, and how each proves that it has it.

    accepting -> calling   32 random bytes, A
    calling -> accepting   32 random bytes, B; HMAC-SHA256(key, "calling" A B)
    accepting -> calling   HMAC-SHA256(key, "accepting" A B)
    calling -> accepting   frames: length of the message (4 bytes, big-endian), HMAC-SHA256(session,
                           number of the frame (8 bytes) message), message;
                           session = HMAC-SHA256(key, "session" A B)

What was recorded fits no other connection, as A and B never come again. Messages are not encrypted:
across networks that others can read, use a tunnel. Nothing that is received can run code."""

from __future__ import annotations

import hmac
import secrets

LENGTH = 4  # bytes of a message's length
NONCE = MAC = 32  # bytes
LEAST_KEY = 16  # bytes


class FrameError(Exception):
    """What came over the connection is no message, or not from who shares the key."""


def length_in(head: bytes, largest: int) -> int:
    """The length that a frame begins with. Raises FrameError for more than `largest` bytes."""
    length = int.from_bytes(head, "big")
    if length > largest:
        raise FrameError(f"expected a message of at most {largest} bytes, found one of {length}.")
    return length


class Seal:
    """Numbers and signs the frames of a connection."""

    def __init__(self, session: bytes) -> None:
        self._session = session
        self._number = 0

    def frame(self, message: bytes) -> bytes:
        """The next frame."""
        return len(message).to_bytes(LENGTH, "big") + self._mac(message) + message

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

    def seal(self) -> Seal:
        """Of the frames that come."""
        return Seal(_mac(self._key, b"session", self._both))


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

    def seal(self) -> Seal:
        """Of the frames that go."""
        return Seal(_mac(self._key, b"session", self._both))


def _mac(key: bytes, label: bytes, both: bytes) -> bytes:
    return hmac.digest(key, label + both, "sha256")


def _check_key(found: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(found, expected):
        raise FrameError("another key")
