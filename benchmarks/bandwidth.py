"""What transfers of weights are held against: how fast this machine copies memory, and sends it from process to process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from common import MIB

SOURCE = 256 * MIB  # about the largest tensor, which stands for all of the weights
MOST = 1024 * MIB  # more than caches hold
STREAMS = 2
BUCKET = 64 * MIB
CHUNK = MIB // 4  # received at a time


@dataclass(frozen=True)
class Taken:
    """By the clock, and by the processor."""

    seconds: float
    cpu_s: float

    def __add__(self, other: Taken) -> Taken:
        return Taken(self.seconds + other.seconds, self.cpu_s + other.cpu_s)


class Timed:
    """From now on, in this process."""

    def __init__(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    def taken(self) -> Taken:
        return Taken(time.perf_counter() - self._began[0], time.process_time() - self._began[1])


class Peak:
    """Private memory of this process beyond `first` bytes (None: what it has now), at its highest, in bytes; sampled."""

    def __init__(self, first: int | None = None) -> None:
        self.most = 0
        self._first = private_bytes() if first is None else first

    def __enter__(self) -> Peak:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(0.002):
            self.most = max(self.most, private_bytes() - self._first)


def private_bytes() -> int:
    """Without files, and without memory that is shared."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def memcpy(size: int) -> Callable[[], Taken]:
    """Copies so many bytes into memory of that size, 1 GiB at most, which has been written to before."""
    source, target = np.ones(SOURCE, np.uint8), np.ones(min(size, MOST), np.uint8)

    def run() -> Taken:
        timed = Timed()
        for start in range(0, size, SOURCE):
            place = target[start % MOST :][: min(SOURCE, size - start)]
            np.copyto(place, source[: len(place)])
        return timed.taken()

    return run


def loopback(pipe: Connection, size: int) -> Callable[[], Taken]:
    """Sends so many bytes over STREAMS sockets to the other process."""
    content = np.ones(min(size, MOST), np.uint8)

    def run() -> Taken:
        with socket.create_server(("127.0.0.1", 0)) as server:
            pipe.send(("loopback", server.getsockname()[1]))
            links = [server.accept()[0] for _ in range(STREAMS)]
            timed = Timed()
            at_once([lambda link=link: send(link, content, size // STREAMS) for link in links])  # type: ignore[misc]
            other: Taken = pipe.recv()
            return Taken(other.seconds, other.cpu_s + timed.taken().cpu_s)

    return run


def send(link: socket.socket, content: np.ndarray, size: int) -> None:
    with link:
        for start in range(0, size, len(content)):
            link.sendall(content[: size - start].data)


def take_loopback(port: int, buckets: list[np.ndarray]) -> Taken:
    if not buckets:
        buckets += [np.ones(BUCKET // STREAMS, np.uint8) for _ in range(STREAMS)]
    links = [socket.create_connection(("127.0.0.1", port)) for _ in range(STREAMS)]
    timed = Timed()
    at_once([lambda link=link, bucket=bucket: drain(link, bucket) for link, bucket in zip(links, buckets)])  # type: ignore[misc]
    return timed.taken()


def drain(link: socket.socket, bucket: np.ndarray) -> None:
    place = 0
    with link:
        while got := link.recv_into(bucket[place : place + CHUNK].data):
            place = (place + got) % len(bucket)


def at_once(runs: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=run) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
