"""Weights over TCP, whole or what changed in them, to readers that have the key.

A reader asks for a version; the answer is its manifest, signed, and whether the version comes whole
or as deltas to the one that the reader has. Tensors then come as they are: from the slots, over
several connections that each take a part in turn. What arrives is compared with the hashes of the
manifest. Where others could change packets on their way, `hash: blake3` or `sha256` finds that too;
xxh3 finds accidents alone. Nothing is encrypted. Nothing that is received can run code."""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from rlflow.errors import ConfigError, RLFlowError, RolloutError
from rlflow.places import Places
from rlflow.rollout.frames import LEAST_KEY, FrameError
from rlflow.rollout.transfer.base import NotYetError, Published, Publisher
from rlflow.rollout.transfer.connection import SCHEME, Connection, deadline_s, host_and_port
from rlflow.rollout.transfer.hashes import HashName, best_hash
from rlflow.rollout.transfer.history import Delta, DeltaHistory
from rlflow.rollout.transfer.manifest import Manifest, parts
from rlflow.rollout.transfer.pins import Pin, pin, versions_in
from rlflow.rollout.transfer.store import MOST_LEFT, Store
from rlflow.values import NonNegativeInt, PositiveFloat, PositiveInt

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 128
MOST_UNPROVEN = 128  # beside them, which have not shown that they have the key
BLOB_BYTES = 2**24
MOST_REQUEST_BYTES = 2**16
LONGEST_WAIT_S = 10.0  # of a request for a version that is not there yet; the reader asks again
EVERYWHERE = ("0.0.0.0", "::")


class TcpPublisher(Publisher):
    """For readers on any machine that can reach this one.

    host: what readers call this machine; None: as in `listen`, or the machine's own name. listen:
    host:port; port 0 is any that is free, 0.0.0.0 all networks of this machine; None: a free port
    of `host`, or of 127.0.0.1. key_file: a file with the secret that readers have too, 16 bytes or
    more; None: a new one, in `key`. delta: readers keep a copy of the weights and get what changed.
    full_every: versions that are a multiple of it are sent whole, 0: none for that reason. streams:
    connections of a reader. timeout_s: of every step of a connection. The others as in
    `SharedMemoryPublisher`."""

    def __init__(
        self,
        listen: str | None = None,
        host: str | None = None,
        key_file: str | None = None,
        delta: bool = False,
        full_every: NonNegativeInt = 0,
        streams: PositiveInt = 2,
        timeout_s: PositiveFloat = 60.0,
        directory: str | None = None,
        elsewhere: str | None = None,
        hash: HashName = "auto",
        part_mib: PositiveInt = 4,
        readers_s: PositiveFloat = 60.0,
    ) -> None:
        self.key = _read_key(key_file) if key_file else secrets.token_hex(32)
        self._full_every, self._streams, self._timeout_s = full_every, streams, timeout_s
        self._deltas = DeltaHistory(BLOB_BYTES) if delta else None
        listen = listen or (f"[{host}]:0" if host and ":" in host else f"{host or '127.0.0.1'}:0")
        place = host_and_port(listen, "weight transfer: listen")
        try:
            family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
            self._server = socket.create_server(place, family=family, backlog=MOST_CONNECTIONS)
        except OSError as error:
            raise ConfigError(
                f"weight transfer: cannot listen at {listen} ({error.strerror or error})."
            ) from None
        try:
            self._store = Store(directory, elsewhere, best_hash(hash), part_mib << 20, readers_s)
        except BaseException:
            self._server.close()
            raise
        named = host or (socket.gethostname() if place[0] in EVERYWHERE else place[0])
        port = self._server.getsockname()[1]
        self.address = f"{SCHEME}[{named}]:{port}" if ":" in named else f"{SCHEME}{named}:{port}"
        self._held: dict[str, tuple[Pin, Connection]] = {}
        self._connections: set[Connection] = set()
        self._unproven = Places(MOST_UNPROVEN)
        self._closed = False
        threading.Thread(target=self._accept, name="rlflow-weights", daemon=True).start()

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Published:
        """See `Publisher.publish`. The delta is made afterwards, in a thread; the next call waits
        for it."""
        began = time.monotonic()
        self._cut_off_stragglers()
        if self._deltas is not None:
            self._deltas.wait()
        before = self._store.versions[-1].manifest.version if self._store.versions else None
        old = None if self._deltas is None or before is None else pin(self._store.folder, None, 0.0)
        manifest = self._store.write(weights, version)
        if self._deltas is not None and old is not None:
            self._deltas.start(old, pin(self._store.folder, None, 0.0))
        return Published(version, manifest.nbytes, time.monotonic() - began, manifest.digest)

    def close(self) -> None:
        """Ends every connection."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for connection in list(self._connections):
            connection.hang_up()
        if self._deltas is not None:
            self._deltas.wait()
        self._store.close()

    def _cut_off_stragglers(self) -> None:
        """Ends connections of readers that are behind by more versions than may be left to readers;
        they have to read again."""
        offered = {version.manifest.version for version in self._store.versions}
        held = list(self._held.values())
        behind = sorted({held_pin.manifest.version for held_pin, _ in held} - offered)
        for held_pin, connection in held:
            if held_pin.manifest.version in behind[: 1 - MOST_LEFT]:
                connection.hang_up()

    # --- connections, each in a thread of its own
    # -------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closed:
            try:
                link, address = self._server.accept()
            except OSError:
                if not self._closed:
                    time.sleep(0.1)  # no descriptors are left, for one
                continue
            connection = Connection(link, self._timeout_s, MOST_REQUEST_BYTES)
            self._unproven.take(connection, address[0], connection.hang_up)
            self._connections.add(connection)
            threading.Thread(
                target=self._serve, args=(connection,), name="rlflow-weights", daemon=True
            ).start()

    def _serve(self, connection: Connection) -> None:
        token = secrets.token_hex(8)
        connection.deadline = time.monotonic() + self._timeout_s  # of the handshake as a whole
        try:
            connection.accept(self.key.encode())
            self._unproven.leave(connection)
            if len(self._connections) > MOST_CONNECTIONS + MOST_UNPROVEN:
                raise FrameError("too many readers")
            while True:
                # Who has found a version takes it over other connections, and this one is silent
                # meanwhile.
                held = self._held.get(token)
                idle_s = (
                    self._timeout_s
                    if held is None
                    else deadline_s(held[0].manifest.size, self._timeout_s)
                )
                connection.deadline = time.monotonic() + idle_s
                connection.socket.settimeout(idle_s)
                request = connection.receive()
                connection.socket.settimeout(self._timeout_s)
                self._answer(connection, request, token)
        except (OSError, FrameError) as error:
            logger.debug("weight transfer: a connection has ended: %r", error)
        finally:
            self._held.pop(token, None)
            self._unproven.leave(connection)
            self._connections.discard(connection)
            connection.close()

    def _answer(self, connection: Connection, request: dict[str, Any], token: str) -> None:
        try:
            if request["op"] == "newest":
                found = versions_in(self._store.folder)
                connection.send({"version": found[-1][1] if found else None})
            elif request["op"] == "find":
                self._find(connection, request, token)
            elif request["op"] == "parts":
                self._send_parts(connection, request, token)
            else:
                raise FrameError(f"unknown request {request['op']!r}")
        except RLFlowError as error:
            connection.send({"error": str(error), "not_yet": isinstance(error, NotYetError)})
        except (KeyError, TypeError, ValueError) as error:
            raise FrameError(f"a request that is none: {error!r}") from None

    def _find(self, connection: Connection, request: dict[str, Any], token: str) -> None:
        """Tells the manifest of a version, and sends the deltas to it where that is the way."""
        held = pin(
            self._store.folder, request["version"], min(float(request["timeout_s"]), LONGEST_WAIT_S)
        )
        self._held[token] = held, connection
        deltas = self._mode(held.manifest, request.get("base"))
        blobs = [blob for delta in deltas or () for blob in delta.blobs]
        connection.send(
            {
                "token": token,
                "streams": self._streams,
                "delta": self._deltas is not None,
                "mode": "full" if deltas is None else "delta",
                "blobs": [[len(blob), blob_hash] for blob, blob_hash in blobs],
            }
        )
        connection.send(held.manifest.encode())
        for blob, _ in blobs:
            connection.socket.sendall(blob)

    def _mode(self, manifest: Manifest, base: Any) -> list[Delta] | None:
        """The deltas to send; None: the whole version. The order of the reasons is that of arXiv
        2605.15565."""
        if self._deltas is None or not isinstance(
            base, dict
        ):  # no deltas here, or the reader keeps no copy, or has none yet
            return None
        if self._full_every and manifest.version % self._full_every == 0:
            return None
        if base.get("layout") != manifest.layout:
            return None
        return self._deltas.path(str(base.get("digest")), manifest)

    def _send_parts(self, connection: Connection, request: dict[str, Any], token: str) -> None:
        """Sends every `of`-th part, from `stream` on, of the tensors from number `first` on."""
        found = self._held.get(str(request["token"]))
        if found is None:
            raise RolloutError("weight transfer: the version is no longer held; read it again.")
        held, self._held[token] = found[0], (found[0], connection)
        first, stream, of = (int(request[key]) for key in ("first", "stream", "of"))
        if min(first, stream) < 0 or of < 1:
            raise ValueError("numbers below 0")
        manifest = held.manifest
        connection.deadline = time.monotonic() + deadline_s(manifest.size, self._timeout_s)
        connection.send(
            {
                "parts": len(
                    range(stream, sum(len(item.hashes) for item in manifest.tensors[first:]), of)
                )
            }
        )
        number = 0
        for item in manifest.tensors[first:]:
            for start, end in parts(item.nbytes, manifest.part_bytes):
                if number % of == stream:
                    if time.monotonic() > connection.deadline:
                        raise TimeoutError("a reader that is too slow")
                    connection.socket.sendall(
                        held.content[item.start + start : item.start + end].data
                    )
                number += 1


def _read_key(path: str) -> str:
    try:
        key = Path(path).read_text().strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"weight transfer: key_file: {path}: cannot be read ({error}).") from None
    if len(key.encode()) < LEAST_KEY:
        raise ConfigError(
            f"weight transfer: key_file: {path}: expected {LEAST_KEY} bytes or more, found {len(key.encode())}."
        )
    return key
