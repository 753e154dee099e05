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


def proof(key: bytes, label: bytes, both: bytes) -> bytes:
    """HMAC-SHA256(key, label A B). both: A and B."""
    return hmac.digest(key, label + both, "sha256")


def check_proof(found: bytes, key: bytes, label: bytes, both: bytes) -> None:
    """Raises FrameError where the other side has another key."""
    if not hmac.compare_digest(found, proof(key, label, both)):
        raise FrameError("another key")


class Seal:
    """Numbers and signs the frames of a connection."""

    def __init__(self, key: bytes, both: bytes) -> None:
        self._session = proof(key, b"session", both)
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
