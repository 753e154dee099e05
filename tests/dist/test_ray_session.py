"""Ray that does not start, is not Ray, or runs already: one line within a deadline, or a connection as the docs print it."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlflow.cluster import session
from rlflow.errors import ConfigError, RLFlowError

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="pip install 'PATH_OR_GIT_URL[ray]'"
)


@pytest.fixture(params=["silent", "HTTP/1", "closes"])
def stranger(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a server that is not Ray."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        kept = []

        def serve() -> None:
            connection, _ = listener.accept()
            kept.append(connection)
            if request.param == "HTTP/1":
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            if request.param == "closes":
                connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        for connection in kept:
            connection.close()


@needs_ray
def test_a_server_that_is_not_ray_is_named_within_the_probes_time(
    stranger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "PROBE_TIMEOUT_S", 0.3)
    with pytest.raises(
        ConfigError, match=rf"no Ray cluster answers at '{stranger}': what listens there is not Ray"
    ):
        session.connect(stranger, cpus=1)


def test_a_failed_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise Exception(
            "The current node timed out during startup.\nSee the logs."
        )  # as Ray raises it

    monkeypatch.setattr(session.RaySession, "close", lambda self: self.abandon())
    with pytest.raises(
        RLFlowError,
        match=r"Ray did not start: Exception: The current node timed out.*cluster\.ranks=0",
    ) as error:
        session._start(session.RaySession(), fail)
    assert "\n" not in str(error.value)


def test_joining_has_a_deadline_and_a_signal_ends_it_at_once() -> None:
    done = threading.Event()
    begun = time.monotonic()
    with pytest.raises(RLFlowError, match="let this process join within 0 s"):
        session._start(session.RaySession(), done.wait, 0.3)
    assert time.monotonic() - begun < 3

    def interrupt() -> None:
        os.kill(os.getpid(), 2)
        done.wait()

    with pytest.raises(KeyboardInterrupt):
        session._start(session.RaySession(), interrupt, 60.0)
    done.set()


@pytest.fixture
def short_path() -> Iterator[str]:
    """A directory whose path leaves room for the names of Ray's sockets, 107 bytes in all."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as path:
        yield path


JOIN = """
import sys
from rlflow.cluster.session import connect
session = connect(sys.argv[1], cpus=1)
import ray
assert ray.get(ray.remote(lambda: 5).remote()) == 5
session.close()
print("joined")
"""


@needs_ray
@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("guarded", [True, False], ids=["token", "open"])
def test_a_running_cluster_is_joined_as_the_docs_print_it(
    tmp_path: Path, short_path: str, guarded: bool
) -> None:
    """With the token of `ray start`, which guards its cluster where the user has one; and a token where the cluster has none."""
    root = Path(__file__).resolve().parents[2]
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0123456789abcdef" * 4)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment = {**clean, "HOME": str(tmp_path), "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    with (
        socket.create_server(("127.0.0.1", 0)) as first,
        socket.create_server(("127.0.0.1", 0)) as second,
    ):
        port, client_port = (free.getsockname()[1] for free in (first, second))
    starter = [
        sys.executable,
        "-c",
        "from ray.scripts.scripts import main; main()",
        "start",
        "--head",
        "--block",
    ]
    options = [
        f"--port={port}",
        "--disable-usage-stats",
        "--include-dashboard=false",
        "--num-cpus=1",
    ]
    options += [
        f"--ray-client-server-port={client_port}",
        "--min-worker-port=0",
        "--max-worker-port=0",
    ]
    options += [f"--temp-dir={short_path}"]
    mode = {} if guarded else {"RAY_AUTH_MODE": "disabled"}
    cluster = subprocess.Popen(
        [*starter, *options],
        env={**environment, **mode},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert cluster.stdout is not None
        lines = []
        while "Ray runtime started" not in (line := cluster.stdout.readline()):
            lines.append(line)
            assert line, "".join(lines)
        address = next(line for line in cluster.stdout if "ray start --address=" in line).split(
            "'"
        )[1]
        joined = subprocess.run(
            [sys.executable, "-c", JOIN, address],
            env=environment,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert joined.stdout == "joined\n", joined.stderr[-2000:]
    finally:
        family = psutil.Process(cluster.pid).children(recursive=True)
        cluster.terminate()
        cluster.wait(timeout=30)
        for process in psutil.wait_procs(family, timeout=10)[1]:
            process.kill()
