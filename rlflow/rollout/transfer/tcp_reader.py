"""Who reads weights over TCP: whole, a part at a time over several connections, or what changed
since the version before."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import socket
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from torch import Tensor

from rlflow.errors import RolloutError
from rlflow.rollout.frames import FrameError
from rlflow.rollout.transfer.base import NotYetError, WeightReader
from rlflow.rollout.transfer.connection import SCHEME, Connection, deadline_s, host_and_port
from rlflow.rollout.transfer.delta import apply_delta
from rlflow.rollout.transfer.hashes import Hash, hash_function, hash_of
from rlflow.rollout.transfer.manifest import (
    Manifest,
    PublishedTensor,
    as_tensor,
    compare,
    decode_manifest,
    parts,
    verify,
)

logger = logging.getLogger(__name__)

BUCKET_BYTES = 2**26  # under way ahead of the tensor that is handed on
LEAST_KEPT = 2**16  # bytes of a tensor whose memory is used again
CHUNK_BYTES = 2**18  # received, and hashed while it is in the cache
MOST_STREAMS = 64
MOST_BLOB_BYTES = 2**31


class TcpReader(WeightReader):
    """Holds one bucket, or one tensor where that is larger, beside the tensor that it hands on,
    between reads too; where the publisher sends deltas, a copy of the weights as well."""

    def __init__(self, address: str, key: str, timeout_s: float = 60.0) -> None:
        self._place = host_and_port(address.removeprefix(SCHEME), "weight transfer")
        self._address, self._key, self._timeout_s = address, key.encode(), timeout_s
        self._open: set[Connection] = set()
        self._memory = Memory()
        self._copy = np.empty(0, np.uint8)  # of the version `_base`, where that is not None
        self._base: Manifest | None = None

    def newest(self, timeout_s: float = 0.0) -> int | None:
        """See `WeightReader.newest`."""
        end = time.monotonic() + timeout_s
        with self._failures(), self._connection() as connection:
            while True:
                connection.send({"op": "newest"})
                version = self._reply(connection)["version"]
                if version is not None or time.monotonic() >= end:
                    return version
                time.sleep(min(0.1, timeout_s / 4))

    def read(
        self, version: int | None = None, timeout_s: float = 60.0
    ) -> Iterator[tuple[str, Tensor]]:
        """See `WeightReader.read`."""
        with self._failures():
            control = self._connect()
            try:
                reply, manifest = self._find(control, version, timeout_s)
            except BaseException:
                self._close(control)
                raise
        self.version, self.delta = manifest.version, False
        return self._tensors(control, reply, manifest)

    def close(self) -> None:
        """Closes what is open, and lets go of the copy."""
        for connection in list(self._open):
            self._close(connection)
        self._memory, self._copy, self._base = Memory(), np.empty(0, np.uint8), None

    # --- one version ------------------------------------------------------------------------------
    # ------------------------

    def _find(
        self, control: Connection, version: int | None, timeout_s: float
    ) -> tuple[dict[str, Any], Manifest]:
        """The answer of the publisher, waited for, and the version's manifest."""
        end = time.monotonic() + timeout_s
        base = self._base and {"digest": self._base.digest, "layout": self._base.layout}
        while True:
            left_s = max(0.0, end - time.monotonic())
            control.send(
                {"op": "find", "version": version, "timeout_s": left_s, "base": base or {}}
            )
            try:
                reply = self._reply(control)
                break
            except NotYetError as error:
                if time.monotonic() >= end:
                    raise RolloutError(f"{error} It was waited for {timeout_s:g} s.") from None
        manifest = decode_manifest(control.receive_bytes(), self._address)
        if version is not None and manifest.version != version:
            raise FrameError(f"version {manifest.version} in place of {version}")
        control.deadline = time.monotonic() + deadline_s(manifest.size, self._timeout_s)
        largest = (
            manifest.size
            if reply["delta"]
            else max((item.nbytes for item in manifest.tensors), default=0)
        )
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if largest > memory:
            raise FrameError(
                f"{largest >> 20} MiB to hold at a time; this machine has {memory >> 20} MiB"
            )
        return reply, manifest

    def _tensors(
        self, control: Connection, reply: dict[str, Any], manifest: Manifest
    ) -> Iterator[tuple[str, Tensor]]:
        try:
            with self._failures():
                if not reply["delta"]:
                    yield from self._whole(reply, manifest, 0, None)
                    return
                base, self._base = self._base, None  # until all of the new version is there
                if reply["mode"] == "delta" and base is not None:
                    self._apply(control, reply["blobs"], manifest)
                    self.delta = True
                    yield from self._changed(reply, manifest)
                else:
                    if len(self._copy) != manifest.size:
                        self._copy = np.zeros(manifest.size, np.uint8)
                    yield from self._whole(reply, manifest, 0, self._copy)
                self._base = manifest
        finally:
            self._close(control)

    def _apply(self, control: Connection, blobs: list[Any], manifest: Manifest) -> None:
        """Receives blobs one after another and writes what they say into the copy."""
        for size, blob_hash in blobs:
            if type(size) is not int or not 0 <= size <= MOST_BLOB_BYTES:
                raise FrameError(f"a delta of {size!r} bytes")
            blob = np.empty(size, np.uint8)
            control.fill(blob.data)
            found = hash_of(manifest.hash, blob)
            if found != blob_hash:
                raise FrameError(
                    f"a delta that hashes to {found[:12]} in place of {str(blob_hash)[:12]}"
                )
            apply_delta(blob.data, self._copy, self._address)
            self.bytes_read += size

    def _changed(self, reply: dict[str, Any], manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the copy. From the first on that is not what was published, they are read
        whole."""
        for number, item in enumerate(manifest.tensors):
            content = self._handed_on(item)
            try:
                for part, (first, last) in enumerate(parts(item.nbytes, manifest.part_bytes)):
                    verify(item, part, content[first:last], manifest, self._address)
            except RolloutError as error:
                logger.warning("%s The copy here was damaged: the version is read whole.", error)
                self.delta = False
                yield from self._whole(reply, manifest, number, self._copy)
                return
            yield item.name, as_tensor(item, content)

    def _handed_on(self, item: PublishedTensor) -> np.ndarray:
        """A copy of what the copy of the weights has of a tensor: who gets that may write to it."""
        content = self._memory.take(item.nbytes)
        content[:] = self._copy[item.start : item.start + item.nbytes]
        return content

    def _whole(
        self, reply: dict[str, Any], manifest: Manifest, first: int, copy: np.ndarray | None
    ) -> Iterator[tuple[str, Tensor]]:
        """The tensors from number `first` on, received and verified; also written to `copy`, where
        there is one."""
        count = min(max(1, int(reply["streams"])), MOST_STREAMS)
        streams: list[Stream] = []
        try:
            for number in range(count):
                connection = self._connect()
                streams.append(Stream(connection, manifest, self._address))
                connection.deadline = time.monotonic() + deadline_s(manifest.size, self._timeout_s)
                connection.send(
                    {
                        "op": "parts",
                        "token": reply["token"],
                        "first": first,
                        "stream": number,
                        "of": count,
                    }
                )
                self._reply(connection)
            for item, content in _ahead(manifest.tensors[first:], streams, self._memory, copy):
                self.bytes_read += item.nbytes
                yield item.name, as_tensor(item, content if copy is None else self._handed_on(item))
                del content  # its memory may be the next tensor's
        finally:
            for stream in streams:
                self._close(stream.connection)
                stream.close()

    # --- connections ------------------------------------------------------------------------------
    # ------------------------

    def _connect(self) -> Connection:
        link = socket.create_connection(self._place, self._timeout_s)
        connection = Connection(link, self._timeout_s)
        self._open.add(connection)
        try:
            connection.deadline = time.monotonic() + self._timeout_s
            connection.call(self._key)
        except BaseException:
            self._close(connection)
            raise
        connection.deadline = float("inf")
        return connection

    @contextlib.contextmanager
    def _connection(self) -> Iterator[Connection]:
        connection = self._connect()
        try:
            yield connection
        finally:
            self._close(connection)

    def _close(self, connection: Connection) -> None:
        with contextlib.suppress(OSError):
            connection.socket.shutdown(socket.SHUT_RDWR)  # ends a thread that reads
        connection.close()
        self._open.discard(connection)

    def _reply(self, connection: Connection) -> dict[str, Any]:
        reply = connection.receive()
        if "error" in reply:
            raise (NotYetError if reply.get("not_yet") else RolloutError)(
                str(reply["error"])[:1000]
            )
        return reply

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """What goes wrong on the way, as a RolloutError that says where."""
        try:
            yield
        except TimeoutError:
            raise RolloutError(
                f"weight transfer: {self._address}: it has not answered for {self._timeout_s:g} s, or is too slow; is the "
                "publisher alive, and the network as fast as it should be?"
            ) from None
        except (OSError, FrameError, KeyError, TypeError, ValueError) as error:
            raise RolloutError(
                f"weight transfer: {self._address}: expected a publisher of weights with the same key, found: "
                f"{' '.join(str(error).split()) or type(error).__name__}."
            ) from None


class Stream:
    """A connection that parts come over, in a thread of its own."""

    def __init__(self, connection: Connection, manifest: Manifest, where: str) -> None:
        self.connection, self._where = connection, where
        self._manifest = manifest
        self.part_bytes = manifest.part_bytes
        self._hash = hash_function(manifest.hash)
        self._thread = ThreadPoolExecutor(1, "rlflow-weights")

    def start(self, item: PublishedTensor, part: int, content: np.ndarray) -> Future[None]:
        """Receives the next part, which is this one, and verifies it."""
        return self._thread.submit(self._receive, item, part, content)

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _receive(self, item: PublishedTensor, part: int, content: np.ndarray) -> None:
        content_hash: Hash = self._hash()
        for first, last in parts(len(content), CHUNK_BYTES):
            chunk = content[first:last]
            self.connection.fill(chunk.data)
            content_hash.update(chunk)
        compare(item, part, content_hash.hexdigest(), self._manifest, self._where)


class Memory:
    """Memory of tensors that nobody has any more, for others of their size: pages that the system
    has to find and clear take longer to fill than loopback takes to deliver what comes into them.
    Spare is a bucket and the largest tensor at most."""

    def __init__(self) -> None:
        self._spare: defaultdict[int, list[mmap.mmap]] = defaultdict(list)
        self._largest = 0

    def take(self, size: int) -> np.ndarray:
        """(size,) uint8; is spare again when neither slices of it nor tensors are left."""
        if size < LEAST_KEPT:
            return np.empty(size, np.uint8)
        self._largest = max(self._largest, size)
        if not self._spare[size]:
            kept = sum(other * len(spare) for other, spare in self._spare.items())
            if kept + size > BUCKET_BYTES + self._largest:
                self._spare.clear()
            self._spare[size].append(
                mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            )
        memory = self._spare[size].pop()
        content = np.frombuffer(
            memory, np.uint8
        )  # what slices share is `content`, as an array does not own the mapping
        weakref.finalize(content, self._give_back, size, memory).atexit = False
        return content

    def _give_back(self, size: int, memory: mmap.mmap) -> None:
        self._spare[size].append(memory)


def _ahead(
    tensors: tuple[PublishedTensor, ...],
    streams: list[Stream],
    memory: Memory,
    copy: np.ndarray | None,
) -> Iterator[tuple[PublishedTensor, np.ndarray]]:
    """(tensor, its bytes) in order, with at most a bucket under way."""
    started: deque[tuple[PublishedTensor, np.ndarray, list[Future[None]]]] = deque()
    size = number = 0
    for item in tensors:
        while started and size + item.nbytes > BUCKET_BYTES:
            size -= started[0][0].nbytes
            yield _finished(started.popleft())
        content = (
            memory.take(item.nbytes)
            if copy is None
            else copy[item.start : item.start + item.nbytes]
        )
        futures = []
        for part, (first, last) in enumerate(parts(item.nbytes, streams[0].part_bytes)):
            futures.append(streams[number % len(streams)].start(item, part, content[first:last]))
            number += 1
        started.append((item, content, futures))
        size += item.nbytes
    while started:
        yield _finished(started.popleft())


def _finished(
    started: tuple[PublishedTensor, np.ndarray, list[Future[None]]],
) -> tuple[PublishedTensor, np.ndarray]:
    item, content, futures = started
    for future in futures:
        future.result()
    return item, content
