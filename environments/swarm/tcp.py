"""TCP between peers that share a key: authenticated, in order, of bounded size and time.

The handshake and the frames are those of `rlflow_environments.swarm.frames`; messages go from who
calls to who accepts only, and are not encrypted: across networks that others can read, use a
tunnel."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlflow.errors import ConfigError
from rlflow.net.places import Places
from rlflow.rollout.event_loop import LoopThread
from rlflow.values import PositiveFloat, PositiveInt
from rlflow_environments.swarm.frames import (
    LEAST_KEY,
    LENGTH,
    MAC,
    NONCE,
    FrameError,
    Seal,
    check_proof,
    length_in,
    proof,
)
from rlflow_environments.swarm.transport import ExperienceTransport

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 32  # accepted at a time
MOST_UNPROVEN = 32  # beside them, which have not shown that they have the key
FRAMES = 256  # of a connection
BROKEN = (OSError, EOFError, TimeoutError, FrameError)
"""How a connection may end early: the peer went away, took too long, or did not keep to the
protocol."""


@dataclass
class TcpTransport(ExperienceTransport):
    """Calls every one of `peers` (host:port) to send, and takes messages at `listen` (port 0: any
    that is free).

    key_file: a file with the secret that all peers share, 16 bytes or more. max_bytes: of a
    message. queue: messages kept for a peer that does not answer, and of those received until they
    are asked for; the newest. timeout_s: for each step of a connection, which as a whole gets ten
    times that."""

    peer: str
    listen: str
    key_file: str
    peers: Sequence[str] = ()
    max_bytes: PositiveInt = 2**20
    queue: PositiveInt = 256
    timeout_s: PositiveFloat = 5.0
    _accepted = _refused = _failures = 0

    def __post_init__(self) -> None:
        self._key = _read_key(self.key_file)
        self._inbox: deque[bytes] = deque(maxlen=self.queue)
        self._outboxes: dict[tuple[str, int], deque[bytes]] = {
            _address(one): deque(maxlen=self.queue) for one in self.peers
        }
        self._calling: set[tuple[str, int]] = set()
        self._unproven = Places(MOST_UNPROVEN)
        host, port = _address(self.listen)
        self._thread = LoopThread("rlflow-swarm")
        try:
            self._server = self._thread.run(asyncio.start_server(self._serve, host, port))
        except OSError as error:
            self._thread.close()
            raise ConfigError(
                f"swarm: cannot listen at {self.listen} ({error.strerror or error})."
            ) from None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that are listened at."""
        host, port, *_ = self._server.sockets[0].getsockname()
        return host, port

    def publish(self, messages: Sequence[bytes]) -> None:
        """Queues them for every peer; a thread of its own sends."""
        for address, outbox in self._outboxes.items():
            outbox.extend(message for message in messages if len(message) <= self.max_bytes)
            if outbox:
                self._thread.start(self._call(address, outbox))

    def receive(self) -> list[bytes]:
        """The messages that peers have sent."""
        return [self._inbox.popleft() for _ in range(len(self._inbox))]

    def report(self) -> dict[str, float]:
        """Connections that were refused or broke off, and calls that failed."""
        counted = {
            "swarm_connections_refused": float(self._refused),
            "swarm_transport_failures": float(self._failures),
        }
        self._refused = self._failures = 0
        return counted

    def close(self) -> None:
        """Takes and sends nothing more."""
        self._thread.run(self._stop())
        self._thread.close()

    async def _stop(self) -> None:
        self._server.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._accepted += 1
        host, *_ = writer.get_extra_info("peername") or [""]  # None: it has left already
        self._unproven.take(writer, host, writer.transport.abort)
        try:
            async with asyncio.timeout(10 * self.timeout_s):
                await self._take(reader, writer)
        except (*BROKEN, asyncio.CancelledError) as error:
            # At the end; asyncio.streams would print a traceback for it
            self._refused += 1
            logger.debug("swarm: a connection was broken off: %r", error)
        finally:
            self._accepted -= 1
            self._unproven.leave(writer)
            writer.close()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = secrets.token_bytes(NONCE)
        writer.write(first)
        answer = await self._read(reader, NONCE + MAC)
        both = first + answer[:NONCE]
        check_proof(answer[NONCE:], self._key, b"calling", both)
        writer.write(proof(self._key, b"accepting", both))
        seal = Seal(self._key, both)
        self._unproven.leave(writer)
        if self._accepted > MOST_CONNECTIONS + MOST_UNPROVEN:
            raise FrameError("too many connections")
        for _ in range(FRAMES):
            try:
                head = await self._read(reader, LENGTH)
            except asyncio.IncompleteReadError as error:
                if error.partial:
                    raise
                return  # the end, between two frames
            length = length_in(head, self.max_bytes)
            mac, message = await self._read(reader, MAC), await self._read(reader, length)
            seal.check(mac, message)
            self._inbox.append(message)
        raise FrameError("too many messages")

    async def _call(self, address: tuple[str, int], outbox: deque[bytes]) -> None:
        if address in self._calling:
            return  # what was queued in the meantime goes with the call under way
        self._calling.add(address)
        try:
            async with asyncio.timeout(10 * self.timeout_s):
                await self._send(address, outbox)
        except BROKEN as error:
            self._failures += 1
            logger.debug("swarm: %s:%d cannot be reached: %r", *address, error)
        finally:
            self._calling.discard(address)

    async def _send(self, address: tuple[str, int], outbox: deque[bytes]) -> None:
        async with asyncio.timeout(self.timeout_s):
            reader, writer = await asyncio.open_connection(*address)
        try:
            second = secrets.token_bytes(NONCE)
            both = await self._read(reader, NONCE) + second
            writer.write(second + proof(self._key, b"calling", both))
            check_proof(await self._read(reader, MAC), self._key, b"accepting", both)
            seal = Seal(self._key, both)
            for _ in range(FRAMES - 1):
                if not outbox:
                    return
                writer.write(seal.frame(outbox.popleft()))
                async with asyncio.timeout(self.timeout_s):
                    await writer.drain()
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, count: int) -> bytes:
        async with asyncio.timeout(self.timeout_s):
            return await reader.readexactly(count)


def _read_key(path: str) -> bytes:
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"swarm.key_file: {path}: cannot be read ({error.strerror}).") from None
    if len(key) < LEAST_KEY:
        raise ConfigError(
            f"swarm.key_file: {path}: expected {LEAST_KEY} bytes or more, found {len(key)}."
        )
    return key


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"swarm: expected an address host:port, found '{text}'.")
    return host.strip("[]"), int(port)
