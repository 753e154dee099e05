"""512 clients over two retrieval servers for minutes, with everything that may happen to them in the middle.

    python benchmarks/retrieval_soak.py [--quick] [--minutes 5] [--passages 200000] [--clients 512] [--directory DIR]

Every answer is compared with what the index finds when it is asked alone. Meanwhile further clients send requests and go away,
one server is halted for two seconds (SIGSTOP: the latency of a machine that swaps), killed (kill -9) and started again. Reported:
answers that were lost or wrong, the slowest /health, the memory of the server that was not killed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from retrieval_server import Server, free_port, make_corpus, make_indices, queries

TOP_K = 5
HALT_S = 2.0
HEALTH_S = 0.25
KNOWN = 400


@dataclass
class Report:
    """What happened. slowest_health_s: of a server that was neither halted nor killed."""

    answers: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    disconnects: int = 0
    slowest_health_s: float = 0.0
    health_checks: int = 0
    memory_mb: list[float] = field(default_factory=list)

    @property
    def memory_growth(self) -> float:
        """The last fifth against the second fifth: the first one fills caches and pools."""
        fifth = max(1, len(self.memory_mb) // 5)
        early, late = self.memory_mb[fifth : 2 * fifth] or self.memory_mb, self.memory_mb[-fifth:]
        return (sum(late) / len(late)) / (sum(early) / len(early)) - 1 if late else 0.0


def soak(
    component: dict, corpus: Path, *, clients: int, seconds: float, known: int = KNOWN
) -> Report:
    """Starts two servers, keeps the clients busy for that long, and reports."""
    from rlflow_environments.retrieval.client.client import HttpRetriever
    from rlflow_environments.retrieval.corpus import Corpus
    from rlflow_environments.retrieval.indices import make_retriever

    source = queries(seed=5)
    asked = [next(source) for _ in range(known)]
    expected = dict(
        zip(asked, make_retriever(component, Corpus(corpus)).search(asked, TOP_K), strict=True)
    )
    ports = [free_port(), free_port()]
    servers = [_start(component, corpus, port) for port in ports]
    report, stop = Report(), threading.Event()
    watchers = [
        threading.Thread(target=_watch, args=(servers[0], report, stop)),
        threading.Thread(target=_disconnect, args=(ports, asked, report, stop)),
        threading.Thread(target=_trouble, args=(servers, component, corpus, seconds, stop)),
    ]
    try:
        retriever = HttpRetriever(
            [f"127.0.0.1:{port}" for port in ports], connections=clients, timeout_s=120, tries=12
        )
        for watcher in watchers:
            watcher.start()
        asyncio.run(_clients(retriever, expected, clients, seconds, report))
    finally:
        stop.set()
        for watcher in watchers:
            watcher.join()
        for server in servers:
            server.process.send_signal(signal.SIGCONT)
            server.process.kill()
            server.process.wait()
    return report


def _start(component: dict, corpus: Path, port: int) -> Server:
    flags = ["--retriever", json.dumps(component), "--corpus", str(corpus), "--port", str(port)]
    return Server([sys.executable, "-m", "rlflow_environments.retrieval", "serve", *flags], port)


async def _clients(retriever, expected: dict, clients: int, seconds: float, report: Report) -> None:
    end = time.monotonic() + seconds
    asked = list(expected)

    async def one(number: int) -> None:
        generator = random.Random(number)
        while time.monotonic() < end:
            query, top_k = generator.choice(asked), generator.randint(1, TOP_K)
            try:
                found = await retriever.find(query, top_k)
            except Exception as problem:  # noqa: BLE001 -- whatever it is, an answer was lost
                report.lost.append(f"{type(problem).__name__}: {problem}")
                continue
            report.answers += 1
            if found != expected[query][:top_k]:
                report.wrong.append(f"{query!r} with topk {top_k}")

    await asyncio.gather(*(one(number) for number in range(clients)))


def _watch(server: Server, report: Report, stop: threading.Event) -> None:
    """Asks the server that nothing happens to how it is."""
    import psutil

    process = psutil.Process(server.process.pid)
    while not stop.wait(HEALTH_S):
        start = time.perf_counter()
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=60) as answer:
            answer.read()
        report.slowest_health_s = max(report.slowest_health_s, time.perf_counter() - start)
        report.health_checks += 1
        report.memory_mb.append(process.memory_info().rss / 2**20)


def _disconnect(
    ports: Sequence[int], asked: Sequence[str], report: Report, stop: threading.Event
) -> None:
    """Clients that send a request, or half of one, and go away."""
    generator = random.Random(0)
    while not stop.wait(0.02):
        body = json.dumps({"queries": [generator.choice(asked)]}).encode()
        head = b"POST /retrieve HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body)
        try:
            with socket.create_connection(
                ("127.0.0.1", generator.choice(ports)), timeout=5
            ) as connection:
                connection.sendall((head + body)[: generator.randint(1, len(head + body))])
        except OSError:  # the one that was killed
            continue
        report.disconnects += 1


def _trouble(
    servers: list[Server], component: dict, corpus: Path, seconds: float, stop: threading.Event
) -> None:
    """What happens to the second server: halted, killed, started again."""
    if stop.wait(seconds * 0.25):
        return
    servers[1].process.send_signal(signal.SIGSTOP)
    stop.wait(HALT_S)
    servers[1].process.send_signal(signal.SIGCONT)
    if stop.wait(seconds * 0.2):
        return
    servers[1].process.kill()
    servers[1].process.wait()
    if not stop.wait(seconds * 0.15):
        servers[1] = _start(component, corpus, servers[1].port)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="10,000 passages, 64 clients, 15 seconds"
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--passages", type=int, default=200_000)
    parser.add_argument("--clients", type=int, default=512)
    parser.add_argument("--kind", default="ivf", choices=("flat", "ivf"))
    parser.add_argument(
        "--directory",
        type=Path,
        help="where corpus and index are kept (default: the temporary folder)",
    )
    args = parser.parse_args()
    if args.quick:
        args.passages, args.clients, args.minutes = 10_000, 64, 0.25
    directory = args.directory or Path(tempfile.gettempdir()) / f"rlflow-benchmark-{args.passages}"
    corpus = make_corpus(directory / "corpus.jsonl", args.passages)
    component = make_indices(directory, corpus, args.passages)[args.kind]
    report = soak(component, corpus, clients=args.clients, seconds=args.minutes * 60)
    print(
        f"{report.answers:,} answers, {len(report.lost)} lost, {len(report.wrong)} wrong; {report.disconnects:,} disconnects"
    )
    print(
        f"slowest /health of {report.health_checks}: {report.slowest_health_s * 1000:.0f} ms (bound 1000 ms)"
    )
    print(f"memory {report.memory_mb[-1]:.0f} MB, growth {report.memory_growth:+.1%}")
    settings = {key: str(value) for key, value in vars(args).items()}
    found = asdict(report)
    found["memory_mb"] = [round(found["memory_mb"][0], 1), round(max(found["memory_mb"]), 1)]
    print(
        json.dumps({**found, "memory_growth": round(report.memory_growth, 4), "settings": settings})
    )
    return 1 if report.lost or report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
