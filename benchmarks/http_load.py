"""A closed loop of HTTP requests over raw connections: as little of the machine for the client as Python allows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

_HEAD = b"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
WARM_UP_S = 0.3


@dataclass
class Figures:
    """What one measurement found. latencies: of answers within `seconds`; answered: also those of the first moments.
    cpu_s: of the server, where somebody books it."""

    seconds: float
    latencies: list[float] = field(default_factory=list)
    answered: int = 0
    failed: int = 0
    cpu_s: float = 0.0

    @property
    def per_second(self) -> float:
        return len(self.latencies) / self.seconds

    def quantile(self, share: float) -> float:
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def measure(port: int, bodies: Iterator[bytes], in_flight: int, seconds: float) -> Figures:
    """Keeps `in_flight` requests under way on as many connections; answers of the first moments do not count."""
    return asyncio.run(_measure(port, bodies, in_flight, seconds))


async def _measure(port: int, bodies: Iterator[bytes], in_flight: int, seconds: float) -> Figures:
    loop = asyncio.get_running_loop()
    begin = time.perf_counter() + WARM_UP_S + seconds / 10
    figures = Figures(seconds)
    clients = [_Client(bodies, figures, begin, port) for _ in range(in_flight)]
    for client in clients:
        await loop.create_connection(lambda client=client: client, "127.0.0.1", port)
    await asyncio.sleep(begin + seconds - time.perf_counter())
    for client in clients:
        client.stopped = True
        client.transport.abort()
    await asyncio.sleep(0.1)  # the server notices, and the other one has the machine for itself
    return figures


class _Client(asyncio.Protocol):
    """One connection: the next request goes out when the answer to the last is whole, over another one where that says so."""

    def __init__(self, bodies: Iterator[bytes], figures: Figures, begin: float, port: int) -> None:
        self._bodies, self._figures, self._begin, self._port = bodies, figures, begin, port
        self._buffer = b""
        self._missing = -1
        self.stopped = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._leaving = False
        self._send()

    def _send(self) -> None:
        body = next(self._bodies)
        self._buffer, self._missing = b"", -1
        self._sent = time.perf_counter()
        self.transport.write(_HEAD % len(body) + body)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._missing < 0:
            head, found, _ = self._buffer.partition(b"\r\n\r\n")
            if not found:
                return
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            self._missing = len(head) + 4 + int(length)
            self._leaving = b"\nconnection: close" in head.lower()
        if len(self._buffer) < self._missing:
            return
        now = time.perf_counter()
        whole = self._buffer.startswith(b"HTTP/1.1 200") and self._buffer.endswith(b"]]}")
        self._figures.failed += not whole
        self._figures.answered += whole
        if whole and self._begin <= now < self._begin + self._figures.seconds:
            self._figures.latencies.append(now - self._sent)
        if not self.stopped and not self._leaving:
            self._send()

    def connection_lost(self, problem: Exception | None) -> None:
        if self._leaving and not self.stopped:
            again = asyncio.get_running_loop().create_connection(
                lambda: self, "127.0.0.1", self._port
            )
            self._task = asyncio.ensure_future(again)
        else:
            self._figures.failed += not self.stopped
