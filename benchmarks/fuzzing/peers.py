"""Silent and slow peers on every port that a server of the project listens on: an honest client is served all the same."""

from __future__ import annotations

import contextlib
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fuzzing.cases import Wrong
from fuzzing.passages import write_corpus

ANSWER_S = 10.0  # an honest client has what it asked for by then
START_S = 60.0
TRICKLE_S = 0.05
BEGINNINGS = (
    b"",
    b"G",
    b"POST /retrieve HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n{",
    b"\x00" * 40,
)


class Peers:
    """The retrieval server as a process; the page of a run and the swarm in threads of this one."""

    def prepare(self, folder: Path) -> None:
        from rlflow_tools.view.live import PageServer

        from rlflow_environments.swarm.tcp import TcpTransport

        self._question = write_corpus(folder / "corpus.jsonl")[0]
        self._key = folder / "key"
        self._key.write_text("a key of this run alone", encoding="ascii")
        self._search, url = _search_server(folder)
        self._page = PageServer(lambda path, nonce: "the page")
        self._swarm = TcpTransport("server", "127.0.0.1:0", str(self._key), timeout_s=30.0)
        self._servers: dict[str, tuple[tuple[str, int], Callable[[], Any]]] = {
            "search": (
                _place(url),
                lambda: _fetch(f"{url}/retrieve", b'{"query": "%s"}' % self._question.encode()),
            ),
            "page": (_place(self._page.url), lambda: _fetch(self._page.url)),
            "swarm": (self._swarm.address, self._send_to_the_swarm),
        }
        self._slowest = dict.fromkeys(self._servers, 0.0)

    def case(self, draw: random.Random, folder: Path) -> bool:
        name, count, beginning = (
            draw.choice(list(self._servers)),
            draw.choice([1, 20, 300]),
            draw.choice(BEGINNINGS),
        )
        trickle = draw.random() < 0.5
        place, ask = self._servers[name]
        with _holding(place, count, beginning, trickle):
            began = time.monotonic()
            try:
                ask()
            except Exception as problem:  # noqa: BLE001 -- whatever an honest client meets here
                told = f"{type(problem).__name__} {problem}"
                raise Wrong(
                    f"{name} beside {count} slow peers ({beginning[:9]!r}, trickle {trickle}): {told}"
                ) from None
            seconds = time.monotonic() - began
        self._slowest[name] = max(self._slowest[name], seconds)
        if seconds > ANSWER_S:
            raise Wrong(f"{name} beside {count} slow peers: an answer after {seconds:.1f} s")
        return True

    def close(self) -> dict[str, float]:
        self._swarm.close()
        self._page.close()
        self._search.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._search.wait(15)
        self._search.kill()
        return {f"slowest_{name}_s": seconds for name, seconds in self._slowest.items()}

    def _send_to_the_swarm(self) -> None:
        from rlflow_environments.swarm.tcp import TcpTransport

        friend = TcpTransport(
            "friend", "127.0.0.1:0", str(self._key), ["{}:{}".format(*self._swarm.address)]
        )
        try:
            friend.publish([b"1"])
            _until(self._swarm.receive, ANSWER_S, "the message came through")
        finally:
            friend.close()


@contextlib.contextmanager
def _holding(place: tuple[str, int], count: int, beginning: bytes, trickle: bool) -> Iterator[None]:
    """Connections that begin so and then say nothing, or a byte now and then."""
    held, over = [], threading.Event()
    for _ in range(count):
        with contextlib.suppress(OSError):  # hung up on already
            held.append(socket.create_connection(place, ANSWER_S))
            held[-1].sendall(beginning)

    def go_on() -> None:
        while trickle and not over.wait(TRICKLE_S):
            for connection in held:
                with contextlib.suppress(OSError):
                    connection.sendall(b"x")

    slow = threading.Thread(target=go_on, daemon=True)
    slow.start()
    try:
        yield
    finally:
        over.set()
        slow.join()
        for connection in held:
            connection.close()


def _search_server(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A retrieval server over the folder's corpus, when it is ready, and its address."""
    flags = ["--retriever", "bm25", "--corpus", str(folder / "corpus.jsonl"), "--port", "0"]
    said = folder / "search.out"
    with said.open("wb") as output:
        program = [sys.executable, "-m", "rlflow_environments.retrieval", "serve", *flags]
        process = subprocess.Popen(program, stdout=output, stderr=output, start_new_session=True)
    _until(lambda: "ready: " in said.read_text(), START_S, "the retrieval server was ready")
    return process, re.search(r"http://\S+", said.read_text())[0]  # type: ignore[index]


def _until(holds: Callable[[], Any], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(0.01)


def _fetch(url: str, body: bytes | None = None) -> bytes:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, body, timeout=ANSWER_S) as answer:
        return answer.read()


def _place(url: str) -> tuple[str, int]:
    host, _, port = url.split("/")[2].rpartition(":")
    return host, int(port)
