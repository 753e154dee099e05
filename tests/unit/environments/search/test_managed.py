"""Claims about the server as a process, and about the service that a run starts for itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from rlflow.errors import ConfigError
from rlflow_environments.retrieval.corpus import Corpus
from rlflow_environments.retrieval.indices import Retriever
from rlflow_environments.retrieval.server.addresses import bind
from rlflow_environments.search import SearchEnvironment, make_retriever
from rlflow_environments.search.managed import start_managed
from tests.unit.environments.retrieval.search_servers import write_corpus
from tests.waiting import until


def start_server(*arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "rlflow_environments.retrieval", "serve", *arguments]
    return subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    )


def test_a_port_in_use_is_one_clear_error_that_names_who_has_it():
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError,
            match=rf"127.0.0.1:{port} is in use by process {os.getpid()} \(.*0 picks a free one",
        ):
            bind("127.0.0.1", port)


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70_000), ("no.such.host.invalid", 0)])
def test_an_address_that_cannot_be_bound_is_a_clear_error(host, port):
    with pytest.raises(ConfigError, match="cannot be bound"):
        bind(host, port)


def test_the_discovery_file_is_there_while_it_answers_and_a_signal_ends_it_in_time(tmp_path):
    addresses = tmp_path / "addresses"
    corpus = str(write_corpus(tmp_path))
    process = start_server(
        "--corpus",
        corpus,
        "--retriever",
        "bm25",
        "--port",
        "0",
        "--save-address-to",
        str(addresses),
    )
    try:
        file = until(lambda: next(addresses.glob("Host*_IP*.txt"), None))
        url = f"http://{file.read_text()}"
        assert httpx.get(f"{url}/ready").status_code == 200 and file.read_text().startswith(
            "127.0.0.1:"
        )
        process.send_signal(signal.SIGHUP)
        until(lambda: 'reloads_total{outcome="done"} 1.0' in httpx.get(f"{url}/metrics").text)
        start = time.monotonic()
        process.terminate()
        assert process.wait(15) == 0 and time.monotonic() - start < 10
        assert list(addresses.iterdir()) == []
    finally:
        process.kill()


# ---------------------------------------------------------------- managed


def questions(folder: Path) -> Path:
    rows = [
        {"question": f"Where is number{row}?", "answer": "harbour", "id": str(row)}
        for row in range(5)
    ]
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_run_has_a_service_of_its_own_until_it_shuts_down(tmp_path):
    corpus = write_corpus(tmp_path)
    options = {"retriever": "bm25", "top_k": 2, "managed": True, "network_host": "127.0.0.2"}
    environment = SearchEnvironment(corpus, questions(tmp_path), **options)
    (child,) = [child for child in psutil.Process().children() if "serve" in child.cmdline()]
    described = Path(child.cmdline()[child.cmdline().index("--retriever") + 1].removeprefix("@"))
    assert "bm25" not in " ".join(child.cmdline())  # with its options, a key among them
    assert described.parent.stat().st_mode & 0o077 == 0  # nobody else gets at them
    assert environment.worker_options()["retriever"]["urls"].startswith("http://127.0.0.2:")

    async def scenario():
        episode = await environment.reset(environment.tasks("train")[3])
        return await environment.step(episode, "<search>number7</search>")

    assert "number7" in asyncio.run(scenario()).observation
    expected = make_retriever("bm25", Corpus(corpus)).search(["market number5"], 2)
    assert environment.retriever.search(["market number5"], 2) == expected
    environment.shutdown()
    assert not child.is_running()
    environment.shutdown()


def test_a_service_that_is_killed_is_started_again_and_costs_no_search(tmp_path, caplog):
    with caplog.at_level("WARNING"):
        service = start_managed("bm25", write_corpus(tmp_path), True)
        try:
            before = service.retriever.search(["market number5"], 2)
            first = service._service.child
            os.kill(first.pid, signal.SIGKILL)
            first.ended.result(10)
            assert service.retriever.search(["market number5"], 2) == before
            assert service._service.child.pid != first.pid
        finally:
            service.stop()
    assert caplog.text.count("it is started again on port") == 1
    assert not [child for child in psutil.Process().children() if "serve" in child.cmdline()]


def test_a_service_that_cannot_start_says_why_and_leaves_nothing(tmp_path):
    with pytest.raises(
        ConfigError, match=r"ended with code 2: ConfigError: .*Did you mean 'title_weight'"
    ):
        start_managed({"name": "bm25", "titel_weight": 1}, write_corpus(tmp_path), True)
    assert not [child for child in psutil.Process().children() if "serve" in child.cmdline()]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_service_ends_when_its_run_is_killed(tmp_path, number):
    code = (
        "import sys, time\n"
        "from rlflow_environments.search.managed import ManagedServer\n"
        "service = ManagedServer({'name': 'bm25'}, sys.argv[1])\n"
        "print(service._service.child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code, str(write_corpus(tmp_path))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
    )
    service = psutil.Process(int(run.stdout.readline()))
    run.send_signal(number)
    run.wait(10)
    until(lambda: not service.is_running() or service.status() == psutil.STATUS_ZOMBIE, 15)


@pytest.mark.parametrize(
    ("component", "options", "named"),
    [
        ({"name": "http", "url": "h:1"}, True, "runs already"),
        (Retriever, True, "by name"),
        ("bm25", {"wait": 3}, "unknown keyword 'wait'.*Did you mean 'wait_s'"),
    ],
)
def test_mistakes_in_the_options_are_named(component, options, named, tmp_path):
    if component is Retriever:
        component = make_retriever("bm25", Corpus(write_corpus(tmp_path)))
    with pytest.raises(ConfigError, match=named):
        start_managed(component, None, options)
