"""Queries per second and latency of the retrieval server, against an uncoalesced one of the usual design.

    python benchmarks/retrieval_server.py [--quick] [--passages 200000] [--seconds 8] [--rounds 3] [--processes 2]

Both servers have the same index and encoder (built-in, 384 dimensions) and no cache; every query is sent once. The usual design
is what the field's servers are: FastAPI, a pydantic body, one request at a time under a lock, faiss' own search of an IVF index
that was read into memory, documents from a list in memory. (For the flat index it has our retriever; and it runs on uvloop and
httptools, which the field does not install.) The rounds of the two are interleaved.
The client is a process of its own, raw asyncio, and shares the cores with the server under test; `--processes N` adds a third
server to the rounds, ours with N processes behind one port.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(Path(__file__).resolve().parent))

import psutil  # noqa: E402
from http_load import Figures, measure  # noqa: E402 -- the folder of this script is no package

from rlflow.storage.files import replacing  # noqa: E402

DIMENSIONS = 384
WORDS_PER_QUERY = 8
TOP_K = 3
IN_FLIGHT = (1, 64, 512)
KINDS = ("flat", "ivf")
TARGETS = {
    ("flat", 64): 3.0,
    ("ivf", 64): 3.0,
    ("ivf", 1): 1.0,
}  # (index, in flight) -> ours / usual
NPROBE = 16


def main() -> int:
    args = _arguments()
    if args.usual:
        return serve_usual(args.usual, args.port)
    directory = args.directory or Path(tempfile.gettempdir()) / f"rlflow-benchmark-{args.passages}"
    corpus = make_corpus(directory / "corpus.jsonl", args.passages)
    components = make_indices(directory, corpus, args.passages)
    results: dict[str, dict] = {}
    for name in args.kinds:
        results[name] = compare(name, components[name], corpus, args)
    report(results, args)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="10,000 passages, one round of a second: under a minute",
    )
    parser.add_argument("--passages", type=int, default=200_000)
    parser.add_argument("--seconds", type=float, default=8.0, help="of one measurement")
    parser.add_argument(
        "--rounds", type=int, default=3, help="measurements of each server, interleaved"
    )
    parser.add_argument("--in-flight", type=int, nargs="+", default=list(IN_FLIGHT))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument(
        "--processes", type=int, default=2, help="of the third server; 1 leaves it out"
    )
    parser.add_argument(
        "--directory",
        type=Path,
        help="where corpus and indices are kept (default: the temporary folder)",
    )
    parser.add_argument("--usual", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.passages, args.seconds, args.rounds = 10_000, 1.0, 1
    return args


# ---------------------------------------------------------------- corpus, queries, indices


def vocabulary() -> list[str]:
    """20,000 pronounceable words, most frequent first."""
    generator = random.Random(1)
    syllables = [
        a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "or", "el")
    ]
    words: dict[str, None] = {}
    while len(words) < 20_000:
        words["".join(generator.choices(syllables, k=generator.randint(2, 4)))] = None
    return list(words)


def make_corpus(path: Path, size: int) -> Path:
    """Passages of 60 words in Zipf's distribution, written once."""
    if not path.is_file():
        words, generator = vocabulary(), random.Random(2)
        weights = [1 / rank for rank in range(10, 10 + len(words))]
        with replacing(path) as aside, aside.open("w", encoding="utf-8") as file:
            for row in range(size):
                title, *body = generator.choices(words, weights, k=62)
                contents = f'"{title} {row}"\n{" ".join(body)}.'
                file.write(
                    json.dumps({"id": str(row), "contents": contents, "url": f"doc://{row}"}) + "\n"
                )
    return path


def queries(seed: int):
    """Queries of eight words, endlessly, no two alike."""
    words, generator = vocabulary(), random.Random(seed)
    while True:
        yield " ".join(generator.choices(words, k=WORDS_PER_QUERY))


def make_indices(directory: Path, corpus: Path, size: int) -> dict[str, dict]:
    """Retriever components by kind of index, over folders that `rlflow search build` makes once."""
    lists = min(1024, max(16, size // 64))
    for name, kind in (("flat", "Flat"), ("ivf", f"IVF{lists},Flat")):
        folder = directory / name
        if not (folder / "meta.json").is_file():
            command = [
                sys.executable,
                "-m",
                "rlflow_environments.retrieval",
                "build",
                "--corpus",
                str(corpus),
            ]
            options = ["--out", str(folder), "--index", kind, "--set", f"dimensions={DIMENSIONS}"]
            subprocess.run(
                [*command, *options], check=True, stdout=subprocess.DEVNULL, env=child_environment()
            )
    return {
        "flat": {"name": "faiss", "path": str(directory / "flat")},
        "ivf": {"name": "faiss", "path": str(directory / "ivf"), "nprobe": NPROBE},
    }


def child_environment() -> dict[str, str]:
    """The children import what this process does, installed or not, and may use every core."""
    threads = str(len(os.sched_getaffinity(0)))
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    return {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "passive",
        "PYTHONPATH": path,
    }


# ---------------------------------------------------------------- the server of the usual design


def serve_usual(component: str, port: int) -> int:
    """An uncoalesced server: FastAPI, a pydantic body, a lock around a blocking search, documents as dictionaries."""
    import threading

    import uvicorn
    from fastapi import FastAPI
    from pydantic import BaseModel

    search = usual_search(**json.loads(component))
    app, lock = FastAPI(), threading.Lock()

    class Request(BaseModel):
        queries: list[str]
        topk: int | None = None
        return_scores: bool = False

    globals()["Request"] = Request  # FastAPI resolves annotations in the module's names

    @app.get("/ready")
    async def ready() -> dict:
        return {}

    @app.post("/retrieve")
    async def retrieve(request: Request) -> dict:
        with lock:
            results = search(request.queries, request.topk or TOP_K)
        if request.return_scores:
            return {
                "result": [
                    [{"document": document, "score": score} for document, score in found]
                    for found in results
                ]
            }
        return {"result": [[document for document, _ in found] for found in results]}

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
    return 0


def usual_search(
    retriever: dict, corpus: str
) -> Callable[[list[str], int], list[list[tuple[dict, float]]]]:
    """(queries, top_k) -> for each query its documents and their scores."""
    from rlflow_environments.retrieval.corpus import Corpus
    from rlflow_environments.retrieval.encoders import NgramEncoder
    from rlflow_environments.retrieval.indices import make_retriever

    passages = Corpus(corpus)
    documents = [{"id": p.id, "contents": p.contents, "url": p.url} for p in passages]
    if "nprobe" in retriever:
        import faiss

        index = faiss.read_index(f"{retriever['path']}/index.faiss")
        index.nprobe = retriever["nprobe"]
        encoder = NgramEncoder.load(f"{retriever['path']}/encoder.json")

        def search(queries: list[str], top_k: int) -> list[list[tuple[dict, float]]]:
            scores, rows = index.search(encoder.encode_queries(queries), top_k)
            pairs = [
                zip(*found, strict=True)
                for found in zip(rows.tolist(), scores.tolist(), strict=True)
            ]
            return [
                [(documents[row], score) for row, score in found if row >= 0] for found in pairs
            ]

        return search
    made = make_retriever(retriever, passages)
    by_id = {document["id"]: document for document in documents}
    return lambda queries, top_k: [
        [(by_id[p.id], p.score) for p in found] for found in made.search(queries, top_k)
    ]


# ---------------------------------------------------------------- measuring


class Server:
    """A server process that is ready."""

    def __init__(self, command: list[str], port: int) -> None:
        self.port = port
        self.process = subprocess.Popen(
            command, env=child_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        for _ in range(3000):
            if self.process.poll() is not None:
                raise SystemExit(
                    (self.process.stderr.read() if self.process.stderr else b"").decode()
                )
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
                    return
            except OSError:
                time.sleep(0.2)
        raise SystemExit("the server did not come up")

    def cpu_s(self) -> float:
        """Seconds of CPU that it has used, with the processes that it started."""
        server = psutil.Process(self.process.pid)
        times = [process.cpu_times() for process in (server, *server.children(recursive=True))]
        return sum(spent.user + spent.system for spent in times)

    def memory(self) -> int:
        """Bytes of memory, what is shared counted once (PSS)."""
        server = psutil.Process(self.process.pid)
        return sum(
            process.memory_full_info().pss for process in (server, *server.children(recursive=True))
        )

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(20)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_servers(component: dict, corpus: Path, processes: int) -> dict[str, Server]:
    """The servers over one index."""
    described = json.dumps({"retriever": component, "corpus": str(corpus)})
    flags = ["--retriever", json.dumps(component), "--corpus", str(corpus), "--cache-mb", "0"]
    commands = {
        "usual": [sys.executable, __file__, "--usual", described],
        "ours": [sys.executable, "-m", "rlflow_environments.retrieval", "serve", *flags],
    }
    if processes > 1:
        commands[f"ours x{processes}"] = [*commands["ours"], "--processes", str(processes)]
    started = {}
    for name, command in commands.items():
        port = free_port()
        started[name] = Server([*command, "--port", str(port)], port)
    return started


def compare(name: str, component: dict, corpus: Path, args: argparse.Namespace) -> dict:
    """{in flight: {server: figures}} for one kind of index, rounds interleaved."""
    servers = start_servers(component, corpus, args.processes)
    source = queries(seed=3)
    try:
        check_equal(servers, source)
        figures: dict = {}
        for in_flight in args.in_flight:
            rounds: dict[str, list[Figures]] = {server: [] for server in servers}
            for _ in range(args.rounds):
                for server, process in servers.items():
                    bodies = (
                        json.dumps({"queries": [query], "topk": TOP_K}).encode() for query in source
                    )
                    before = process.cpu_s()
                    found = measure(process.port, bodies, in_flight, args.seconds)
                    found.cpu_s = process.cpu_s() - before
                    rounds[server].append(found)
            figures[in_flight] = {server: summary(found) for server, found in rounds.items()}
            show(name, in_flight, figures[in_flight])
        print(
            "memory: "
            + ", ".join(
                f"{server} {process.memory() / 2**20:,.0f} MiB"
                for server, process in servers.items()
            )
        )
    finally:
        for process in servers.values():
            process.stop()
    return figures


def check_equal(servers: dict[str, Server], source) -> None:
    """All servers must find the same, or the comparison means nothing."""
    asked = [next(source) for _ in range(50)]
    body = json.dumps({"queries": asked, "topk": TOP_K, "return_scores": True}).encode()
    answers = []
    for server in servers.values():
        request = urllib.request.Request(
            f"http://127.0.0.1:{server.port}/retrieve", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            answers.append(json.load(reply)["result"])
    for found in zip(*answers, strict=True):
        documents = [[hit["document"] for hit in hits] for hits in found]
        scores = [[hit["score"] for hit in hits] for hits in found]
        close = all(
            abs(a - b) <= 1e-5
            for other in scores[1:]
            for a, b in zip(scores[0], other, strict=True)
        )
        if any(other != documents[0] for other in documents) or not close:
            raise SystemExit("the servers find different documents")


def summary(rounds: list[Figures]) -> dict:
    """The round with the median rate; answers that were lost or wrong in any round."""
    middle = sorted(rounds, key=lambda found: found.per_second)[len(rounds) // 2]
    return {
        "queries_per_s": round(middle.per_second, 1),
        "p50_ms": round(middle.quantile(0.5) * 1000, 2),
        "p99_ms": round(middle.quantile(0.99) * 1000, 2),
        "cpu_ms": round(
            sum(f.cpu_s for f in rounds) / max(1, sum(f.answered for f in rounds)) * 1000, 3
        ),
        "failed": sum(found.failed for found in rounds),
        "spread": round(
            statistics.pstdev(f.per_second for f in rounds) / max(1e-9, middle.per_second), 3
        ),
    }


def show(name: str, in_flight: int, figures: dict[str, dict]) -> None:
    for server, found in figures.items():
        print(
            f"{name:>5} {in_flight:>5} in flight  {server:<8} {found['queries_per_s']:>9.1f} queries/s   "
            f"p50 {found['p50_ms']:>8.1f} ms   p99 {found['p99_ms']:>8.1f} ms   "
            f"cpu {found['cpu_ms']:>7.2f} ms/query   failed {found['failed']}"
        )
    ratios = ", ".join(f"{server} {value:.2f}x" for server, value in ratios_of(figures).items())
    print(f"{'':>24}ratio: {ratios}", flush=True)


def ratios_of(figures: dict[str, dict]) -> dict[str, float]:
    """Each of ours by the usual one; infinite where that answered nothing in its time."""
    usual = figures["usual"]["queries_per_s"]
    ours = {
        server: found["queries_per_s"] for server, found in figures.items() if server != "usual"
    }
    return {
        server: round(rate / usual, 2) if usual else float("inf") for server, rate in ours.items()
    }


def report(results: dict[str, dict], args: argparse.Namespace) -> None:
    ratios = {
        f"{name}_{in_flight}": ratios_of(found)
        for name, by_load in results.items()
        for in_flight, found in by_load.items()
    }
    versions = {
        name: metadata.version(name)
        for name in ("torch", "faiss-cpu", "uvicorn", "fastapi", "orjson", "numpy")
    }
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
    }
    print(", ".join(f"{name} {version}" for name, version in {**versions, **machine}.items()))
    for (kind, in_flight), target in TARGETS.items():
        for server, found in ratios.get(f"{kind}_{in_flight}", {}).items():
            met = "met" if found >= target else "NOT met"
            print(f"{kind}, {server}: {found}x at {in_flight} in flight, target {target}x: {met}")
    settings = {
        "passages": args.passages,
        "dimensions": DIMENSIONS,
        "seconds": args.seconds,
        "rounds": args.rounds,
    }
    print(
        json.dumps(
            {
                "ratios": ratios,
                "figures": results,
                "settings": settings,
                "versions": versions,
                "machine": machine,
            }
        )
    )


if __name__ == "__main__":
    sys.exit(main())
