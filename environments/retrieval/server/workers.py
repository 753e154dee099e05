"""Several processes behind one port, under uvicorn's supervisor, which starts again what dies."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess

from rlflow.errors import ConfigError, DataError
from rlflow.storage.files import write_text
from rlflow_environments.common.commands import log_to_stderr
from rlflow_environments.retrieval.server.app import SearchApp
from rlflow_environments.retrieval.server.connections import allow_many_files
from rlflow_environments.retrieval.server.loading import ServedSource
from rlflow_environments.retrieval.server.process import LAST_RESORT_S, Life, logger, server_config
from rlflow_environments.retrieval.server.query_log import QueryLog
from rlflow_environments.retrieval.server.service import SearchService, ServiceLimits
from rlflow_environments.retrieval.server.shared import SharedState
from rlflow_environments.retrieval.server.statistics import ServerStatistics
from rlflow_environments.retrieval.server.threads import own_threads

HUNG_S = 10  # without an answer to uvicorn's ping, which a thread of its own gives
AGAIN_S = 3.0  # before a process that cannot load what the others have is started again
PROBLEM = "problem"
UNSHARED = ("qdrant", "http")


@dataclass(frozen=True)
class WorkerSetup:
    """What a process is told at its start. folder: what the processes share."""

    source: ServedSource
    limits: ServiceLimits
    query_log: str | None
    token: str
    folder: Path
    processes: int


def serve_by_workers(
    setup: WorkerSetup,
    listener: socket.socket,
    *,
    parent: int | None,
    on_ready: Callable[[], None],
    on_stop: Callable[[], None],
) -> None:
    """As `process.serve`, by several processes. Raises ConfigError for a retriever that they cannot
    have, DataError with what the first of them found wrong, what on_ready raises."""
    check_sharable(setup.source.retriever, setup.processes)
    os.environ["OMP_NUM_THREADS"] = str(max(1, own_threads() // setup.processes))
    os.environ["PYTHONSAFEPATH"] = "1"  # what lies where the user stands is not imported
    app = functools.partial(make_worker, setup)
    config = server_config(
        app, factory=True, workers=setup.processes, timeout_worker_healthcheck=HUNG_S
    )
    _Supervisor(config, listener, setup, parent, on_ready, on_stop).run()
    problem = setup.folder / PROBLEM
    if problem.exists():
        config, text = json.loads(problem.read_text())
        raise (ConfigError if config else DataError)(text)


class _Supervisor(Multiprocess):
    """uvicorn's; SIGHUP reloads in all processes instead of ending them."""

    def __init__(
        self,
        config: Any,
        listener: socket.socket,
        setup: WorkerSetup,
        parent: int | None,
        on_ready: Callable[[], None],
        on_stop: Callable[[], None],
    ) -> None:
        super().__init__(config, [listener])
        self._shared = SharedState(setup.folder, setup.processes)
        self._parent, self._on_ready, self._on_stop = parent, on_ready, on_stop
        self._told = False

    def keep_subprocess_alive(self) -> None:
        if self._parent is not None and os.getppid() != self._parent:
            self.should_exit.set()
        for process in self.processes:
            process.child_conn.close()  # ours: else a ping to a process that dies waits in vain
        before = {process.pid for process in self.processes}
        super().keep_subprocess_alive()
        for pid in before - {process.pid for process in self.processes}:
            logger.error("process %d died: another one takes its place", pid)
        if not self._told and self._shared.started() and not self.should_exit.is_set():
            self._told = True
            self._on_ready()

    def handle_hup(self) -> None:
        ready = self._shared.ready()["pid"]
        if len(ready):
            os.kill(int(ready[0]), signal.SIGHUP)

    def handle_ttin(self) -> None:
        """Nothing: the number of processes is fixed."""

    handle_ttou = handle_ttin

    def run(self) -> None:
        try:
            super().run()
        except BaseException:
            self.terminate_all()
            self.join_all()
            raise

    def terminate_all(self) -> None:
        self._on_stop()
        super().terminate_all()

    def join_all(self) -> None:
        end = time.monotonic() + LAST_RESORT_S
        for process in self.processes:
            process.process.join(max(0.0, end - time.monotonic()))
            process.process.kill()
            process.process.join()


def make_worker(setup: WorkerSetup) -> SearchApp:
    """The application of one process, where uvicorn calls it."""
    log_to_stderr()
    allow_many_files()
    shared = SharedState(setup.folder, setup.processes)
    shared.join()
    statistics = ServerStatistics(shared.recent, shared.place)
    log = QueryLog(setup.query_log) if setup.query_log else None
    load = setup.source.load
    service = SearchService(load, setup.limits, log, statistics, setup.token, shared)

    def stop() -> None:
        if service.problem is None:
            signal.raise_signal(signal.SIGTERM)
            return
        if shared.started():
            logger.error("%s", service.problem)
            time.sleep(AGAIN_S)
            os._exit(1)
        told = [isinstance(service.problem, ConfigError), str(service.problem)]
        write_text(setup.folder / PROBLEM, json.dumps(told), durable=False)
        sys.stderr.flush()
        os._exit(STARTUP_FAILURE)

    return SearchApp(service, Life(service, stop, parent=os.getppid()).run)


def check_sharable(retriever: Mapping[str, Any], processes: int) -> None:
    """Raises ConfigError for a retriever that several processes of one server cannot have."""
    if not sys.platform.startswith("linux"):
        raise ConfigError(
            f"--processes {processes}: needs Linux. Use --processes 1, or several servers."
        )
    if retriever.get("name") in UNSHARED:
        raise ConfigError(
            f"--processes {processes}: the retriever {retriever['name']} is a connection, or a "
            "folder that one process may open; several processes cannot share it. Use "
            "--processes 1, or several servers."
        )
    if retriever.get("gpu") or str(retriever.get("device", "cpu")) != "cpu":
        raise ConfigError(
            f"--processes {processes}: the index is on a GPU, and each process would put a copy "
            "there. Use --processes 1."
        )
