"""Claims about a server of several processes: it answers as one does, loses little with a process, and nothing at a reload."""

from __future__ import annotations

import http.client
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from rlflow.errors import ConfigError
from rlflow_environments.retrieval.__main__ import main
from rlflow_environments.retrieval.server import process as process_module
from rlflow_environments.retrieval.server.process import _Process, check_sharable, server_config
from tests.unit.environments.retrieval.search_servers import write_corpus, write_pages
from tests.waiting import until


class Running:
    """A server with several processes, as a process."""

    def __init__(self, folder: Path, *arguments: str, size: int = 60) -> None:
        self.corpus = write_corpus(folder, size)
        self.errors = folder / "stderr"
        command = [
            sys.executable,
            "-m",
            "rlflow_environments.retrieval",
            "serve",
            "--corpus",
            str(self.corpus),
            "--port",
            "0",
        ]
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*command, "--processes", "2", *arguments],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        match = re.search(r"http://127.0.0.1:(\d+)", said)
        assert match, f"{said}{self.errors.read_text()}"
        self.port = int(match[1])
        self.url = match[0]
        token = re.search(r"admin token in (\S+)\)", said)
        assert token
        self.token_file = Path(token[1])
        self.admin = {"Authorization": f"Bearer {self.token_file.read_text()}"}

    def wait(self) -> None:
        assert self.process.stdout is not None and self.process.stdout.readline().startswith(
            "ready"
        ), self.errors.read_text()

    def get(self, path: str) -> dict:
        return httpx.get(self.url + path, timeout=60).json()

    def pids(self) -> set[int]:
        return {one["pid"] for one in self.get("/health")["processes"]}

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def running(folder: Path, *arguments: str, **options: int) -> Iterator[Running]:
    server = Running(folder, *arguments, **options)
    try:
        server.wait()
        yield server
    finally:
        children = server.children() if server.process.poll() is None else []
        server.process.terminate()
        try:
            server.process.wait(20)
        finally:
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()


class Clients:
    """Threads that ask over connections which they keep, and hold every answer against the first one to the same query."""

    def __init__(self, server: Running, count: int, queries: int = 60) -> None:
        self.answered = 0
        self.wrong: list[str] = []
        self.lost: list[str] = []
        self._port, self._queries = server.port, queries
        self._expected = {
            row: self._ask(http.client.HTTPConnection("127.0.0.1", server.port), row)
            for row in range(queries)
        }
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(count)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self, connection: http.client.HTTPConnection, row: int) -> tuple[int, bytes]:
        connection.request(
            "POST", "/retrieve", json.dumps({"query": f"number{row}", "return_scores": True})
        )
        answer = connection.getresponse()
        return answer.status, answer.read()

    def _run(self, seed: int) -> None:
        generator = random.Random(seed)
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        while not self._stop.is_set():
            row = generator.randrange(self._queries)
            try:
                found = self._ask(connection, row)
            except (OSError, http.client.HTTPException) as problem:
                self.lost.append(repr(problem))
                connection.close()
                continue
            self.answered += 1
            if found != self._expected[row]:
                self.wrong.append(f"{row}: {found}")


@pytest.mark.parametrize("name", ["qdrant", "http"])
def test_what_processes_cannot_share_is_refused_in_one_line(name, tmp_path, capsys):
    with pytest.raises(
        ConfigError, match=f"--processes 2: the retriever {name} .* Use --processes 1"
    ):
        check_sharable({"name": name}, 2)
    with pytest.raises(ConfigError, match="on a GPU"):
        check_sharable({"name": "faiss", "gpu": True}, 2)
    assert main(["serve", "--processes", "0", "--retriever", name]) == 2
    assert "--processes: expected at least 1, found 0" in capsys.readouterr().err


@pytest.fixture
def child() -> Iterator[_Process]:
    """A process of a server as its supervisor has it; what it answers, the test says."""
    made = _Process(server_config(None), [])
    made.process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    made.start()
    yield made
    made.kill()
    made.join()


def test_a_process_is_given_time_until_its_first_answer_and_less_afterwards(child: _Process):
    """One that imports for a minute was killed after ten seconds, and so was the next one, for ever."""
    began = time.monotonic()
    assert all(child.is_alive(5) for _ in range(100))
    assert time.monotonic() - began < 2.0, "each look waited for an answer"
    child.child_conn.recv()
    child.child_conn.send(False)
    assert child.is_alive(5)
    assert not child.is_alive(0.01), "the second ping was not answered"


def test_a_process_that_never_answers_or_ends_is_not_alive(
    child: _Process, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(process_module, "START_WORD_S", 0.0)
    assert child.is_alive(5) and not child.never_answered
    assert child.is_alive(5) and caplog.text.count("still starting") == 1
    monkeypatch.setattr(process_module, "START_S", 0.0)
    assert not child.is_alive(5) and child.never_answered
    monkeypatch.setattr(process_module, "START_S", 600.0)
    child.process.kill()
    child.process.join()
    assert not child.is_alive(5) and not child.never_answered


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_start_that_takes_longer_than_an_answer_may_is_waited_for(tmp_path, monkeypatch):
    """As where modules lie on a network's disk: each process sleeps while it starts."""
    slow = tmp_path / "slow"
    slow.mkdir()
    text = "import sys, time\nif any('multiprocessing.spawn' in a for a in sys.orig_argv): time.sleep(14)\n"
    (slow / "sitecustomize.py").write_text(text)
    monkeypatch.setattr(sys, "path", [str(slow), *sys.path])
    with running(tmp_path, "--retriever", "bm25") as server:
        assert server.get("/health")["restarts"] == 0


def test_two_processes_answer_as_one_and_count_together_and_end_together(tmp_path):
    log = tmp_path / "queries.jsonl"
    arguments = [
        "--retriever",
        "bm25",
        "--pages",
        str(write_pages(tmp_path)),
        "--query-log",
        str(log),
    ]
    with running(tmp_path, *arguments, "--save-address-to", str(tmp_path / "addresses")) as server:
        assert len(list((tmp_path / "addresses").iterdir())) == 1
        status, identity = server.get("/health"), server.get("/info")["identity"]
        assert (
            status["status"] == "ready"
            and len(status["processes"]) == 2
            and status["restarts"] == 0
        )
        clients = [httpx.Client(base_url=server.url) for _ in range(6)]
        for row in range(60):
            answer = clients[row % 6].post("/retrieve", json={"query": f"number{row}", "topk": 1})
            assert answer.json()["result"][0][0]["contents"].split()[3] == f"number{row}"
            assert answer.headers["x-index"] == identity
        page = (
            clients[0]
            .post("/access", json={"urls": ["https://w/index.php?title=Alder_0", "none"]})
            .json()["result"]
        )
        assert page[0]["contents"] == "page 0" and page[1] is None
        assert clients[0].get("/none").status_code == 404
        assert server.token_file.stat().st_mode & 0o777 == 0o600
        assert (
            clients[0].post("/admin/reload", json={"corpus": 3}, headers=server.admin).status_code
            == 422
        )
        assert clients[0].post("/admin/reload").status_code == 401
        metrics = clients[1].get("/metrics").text
        assert (
            "rlflow_search_queries_total 60.0" in metrics and "rlflow_search_ready 1.0" in metrics
        )
        children = server.children()
        pids = [process["pid"] for process in status["processes"]]
        folder = server.token_file.parent  # that the processes share
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(15) == 0
        until(
            lambda: (
                not any(
                    child.is_running() and child.status() != psutil.STATUS_ZOMBIE
                    for child in children
                )
            ),
            10,
        )
        assert not folder.exists()
        assert not list((tmp_path / "addresses").iterdir())
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert sorted(line["queries"][0] for line in lines) == sorted(
        f"number{row}" for row in range(60)
    )
    assert len([child for child in children if child.pid in pids]) == 2


@pytest.mark.slow
def test_a_killed_process_costs_the_requests_in_its_hands_and_is_replaced(tmp_path):
    with running(tmp_path, "--retriever", "bm25", "--cache-mb", "0") as server:
        clients = Clients(server, 16)
        until(lambda: clients.answered > 500)
        victim = server.get("/health")["processes"][0]["pid"]
        os.kill(victim, signal.SIGKILL)
        health = until(
            lambda: (
                (found := server.get("/health"))["restarts"] == 1
                and len(found["processes"]) == 2
                and found
            )
        )
        assert victim not in [process["pid"] for process in health["processes"]]
        shared = until(
            lambda: all(one["connections"] >= 6 for one in server.get("/health")["processes"])
        )
        answered = clients.answered
        time.sleep(6)  # longer than uvicorn keeps a connection that nobody uses
        clients.end()
        assert shared and clients.answered > answered and clients.wrong == []
        assert 0 < len(clients.lost) <= 16
        counted = re.search(r"queries_total (\d+)", httpx.get(server.url + "/metrics").text)
        assert (
            counted is not None and int(counted[1]) >= clients.answered
        )  # those of the dead one included
        assert f"process {victim} died" in server.errors.read_text()


@pytest.mark.slow
def test_a_reload_switches_all_processes_and_loses_nothing(tmp_path):
    with running(tmp_path, "--retriever", "bm25", "--cache-mb", "0") as server:
        old, pids = server.get("/info")["identity"], server.pids()
        clients = Clients(server, 16, queries=40)
        until(lambda: clients.answered > 300)
        kept = httpx.Client(base_url=server.url, timeout=120)
        kept.post("/retrieve", json={"query": "number1"})
        server.corpus.rename(tmp_path / "away.jsonl")
        refused = kept.post("/admin/reload", headers=server.admin)
        assert refused.status_code == 422 and refused.json()["kept"]["identity"] == old
        assert kept.post("/retrieve", json={"query": "number1"}).headers["x-index"] == old
        write_corpus(tmp_path, 61)  # the same passages for all that is asked, and a further one
        new = kept.post("/admin/reload", headers=server.admin).json()["identity"]
        assert new != old
        until(lambda: len(server.pids()) == 2 and not server.pids() & pids, 60)
        for _ in range(8):
            answer = httpx.post(server.url + "/retrieve", json={"query": "number60", "topk": 1})
            assert answer.headers["x-index"] == new
        before = server.pids()
        kept.post("/admin/reload", json={"retriever": {"k1": 2.0}}, headers=server.admin)
        until(lambda: len(server.pids()) == 2 and not server.pids() & before, 60)
        assert server.get("/info")["index"]["k1"] == 2.0
        assert server.get("/health")["restarts"] == 0
        clients.end()
        assert clients.lost == [] and clients.answered > 300


@pytest.mark.slow
def test_a_request_that_is_on_its_way_when_its_process_ends_is_answered(tmp_path):
    with running(tmp_path, "--retriever", "bm25") as server:
        kept, fresh = (
            http.client.HTTPConnection("127.0.0.1", server.port, timeout=60) for _ in range(2)
        )
        body = json.dumps({"query": "number1"})
        kept.request("POST", "/retrieve", body)
        assert kept.getresponse().read()
        fresh.connect()
        until(lambda: sum(one["connections"] for one in server.get("/health")["processes"]) >= 2)
        server.process.terminate()
        time.sleep(0.5)
        for connection in (kept, fresh):
            connection.request("POST", "/retrieve", body)
            assert connection.getresponse().status == 200


@pytest.mark.slow
def test_a_signal_whose_index_cannot_be_loaded_changes_nothing(tmp_path):
    with running(tmp_path, "--retriever", "bm25") as server:
        pids = server.pids()
        server.corpus.rename(tmp_path / "away.jsonl")
        server.process.send_signal(signal.SIGHUP)
        until(lambda: "reload failed" in server.errors.read_text(), 60)
        assert server.pids() == pids
        assert httpx.post(server.url + "/retrieve", json={"query": "number1"}).status_code == 200


@pytest.mark.slow
def test_the_processes_share_an_index_folder_and_their_idle_threads_wait_passively(
    tmp_path, monkeypatch
):
    """The latter by what OpenMP's runtime tells where it is loaded: threads that spin take the cores from rollouts."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("OMP_DISPLAY_ENV", "verbose")
    corpus, index = write_corpus(tmp_path, 8000), tmp_path / "index"
    assert (
        main(
            [
                "build",
                "--corpus",
                str(corpus),
                "--out",
                str(index),
                "--index",
                "SQ8",
                "--set",
                "dimensions=4096",
            ]
        )
        == 0
    )
    with running(tmp_path, "--index", str(index), size=8000) as server:
        for row in range(50):
            httpx.post(server.url + "/retrieve", json={"query": f"number{row}"}).raise_for_status()
        for worker in server.get("/health")["processes"]:
            maps = psutil.Process(worker["pid"]).memory_maps()
            mapped = [one for one in maps if one.path.startswith(str(index))]
            assert sum(one.size for one in mapped) > 8000 * 4096
            assert sum(one.private_dirty for one in mapped) == 0
        assert set(re.findall(r"GOMP_SPINCOUNT = '(\d+)'", server.errors.read_text())) == {"0"}


@pytest.mark.slow
def test_no_process_outlives_a_server_that_was_killed(tmp_path):
    with running(tmp_path, "--retriever", "bm25") as server:
        children = server.children()
        server.process.kill()
        until(
            lambda: (
                not any(
                    child.is_running() and child.status() != psutil.STATUS_ZOMBIE
                    for child in children
                )
            ),
            15,
        )
