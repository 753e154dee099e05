"""The processes of a server: one, or several behind one port under uvicorn's supervisor, which
starts again what dies."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import math
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess
from uvicorn.supervisors.multiprocess import Process

from rlflow.errors import ConfigError, DataError, RLFlowError
from rlflow.storage.files import write_text
from rlflow_environments.common.commands import log_to_stderr
from rlflow_environments.common.connections import ImpatientProtocol
from rlflow_environments.retrieval.indices.make import retriever_facts
from rlflow_environments.retrieval.server.addresses import BACKLOG, allow_many_files
from rlflow_environments.retrieval.server.app import Receive, SearchApp, Send
from rlflow_environments.retrieval.server.index import own_threads
from rlflow_environments.retrieval.server.loading import ServedSource
from rlflow_environments.retrieval.server.service import SearchService, ServiceLimits
from rlflow_environments.retrieval.server.shared import SharedState
from rlflow_environments.retrieval.server.statistics import QueryLog
from rlflow_environments.retrieval.server.wire import NotServed

logger = logging.getLogger(__name__)

GRACE_S = 4  # for answers that are under way when the server is asked to stop
LAST_RESORT_S = 8.0  # after that a process is killed, whatever it does
WATCH_S = 0.25
START_S = 600.0  # for a process's first answer: it imports everything before
START_WORD_S = 30.0  # after which the log says that a process still starts
HUNG_S = 10  # later, without an answer to uvicorn's ping, which a thread of its own gives
LOAD_S = 3600.0  # for a process that takes another's place
DRAIN_S = 1.0  # in which connections leave, each after an answer, before a process is replaced
AGAIN_S = 3.0  # before a process that cannot load what the others have is started again
PROBLEM, CHANGES, ASKED = "problem", "changes.json", "asked.json"


@dataclass(frozen=True)
class ServerSetup:
    """What a process is told at its start. folder: what the processes share."""

    source: ServedSource
    limits: ServiceLimits
    query_log: str | None
    token: str
    folder: Path
    processes: int = 1

    def service(self, **shared: Any) -> SearchService:
        log = QueryLog(self.query_log) if self.query_log else None
        return SearchService(self.source.load, self.limits, log, self.token, **shared)


@contextlib.contextmanager
def handled(numbers: Iterable[int], handler: Callable[[int], None]) -> Iterator[None]:
    """Inside, signals call `handler`, in the main thread, which alone may say so; afterwards those
    who had them have them again."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            before[number] = signal.signal(number, lambda number, frame: handler(number))
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


class Life:
    """uvicorn's lifespan: loading, looking around several times a second, the end."""

    def __init__(
        self,
        service: SearchService,
        stop: Callable[[], None],
        *,
        parent: int | None = None,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """stop: asks uvicorn to end. parent: the process whose end ends this one."""
        self._service, self._stop, self._parent, self._on_ready = service, stop, parent, on_ready
        self._asked: set[int] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, app: SearchApp, receive: Receive, send: Send) -> None:
        """The messages of the lifespan protocol."""
        service = self._service
        await receive()
        with handled((signal.SIGHUP, signal.SIGUSR1), self._asked.add):
            if service.shared is not None and service.shared.started():
                await self._load()  # others answer: connections come when this one can, too
            else:
                self._start(self._load())
            self._start(self._watch(app))
            await send({"type": "lifespan.startup.complete"})
            await receive()
            service.stop()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if service.query_log is not None:
                service.query_log.close()
        await send({"type": "lifespan.shutdown.complete"})

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self) -> None:
        try:
            await self._service.load()
            if self._service.state == "ready":
                self._on_ready()
        except Exception as problem:  # noqa: BLE001 -- raised when the server has ended
            self._service.fail(problem)
            self._stop()

    async def _reload(self) -> None:
        with contextlib.suppress(RLFlowError, OSError, NotServed):  # logged and counted
            await self._service.reload({})

    async def _watch(self, app: SearchApp) -> None:
        service, leaving = self._service, False
        while True:
            if self._parent is not None and os.getppid() != self._parent:
                logger.warning("the process %d that started this server is gone", self._parent)
                self._stop()
            if signal.SIGHUP in self._asked:
                self._start(self._reload())
            leaving = leaving or signal.SIGUSR1 in self._asked
            self._asked.clear()
            if service.query_log is not None:
                service.query_log.flush()
            service.tell(len(app.connections))
            if service.shared is not None:
                app.excess = math.inf if leaving else service.shared.excess()
            await asyncio.sleep(WATCH_S)


def server_config(app: Any, **options: Any) -> uvicorn.Config:
    """How uvicorn serves."""
    return uvicorn.Config(
        app,
        http=ImpatientProtocol,  # type: ignore[arg-type]
        log_level="warning",
        access_log=False,  # a line per request slows rollouts down; the query log is buffered
        lifespan="on",
        ws="none",
        proxy_headers=False,  # costs time, and would let a header say who is local
        timeout_graceful_shutdown=GRACE_S,
        backlog=BACKLOG,
        **options,
    )


# ---------------------------------------------------------------- one process


class _Alone(uvicorn.Server):
    """uvicorn's, without the signals that it would raise once more when it has ended."""

    stop: Callable[[], None]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        with handled((signal.SIGTERM, signal.SIGINT), lambda number: self.stop()):
            yield


def serve(
    service: SearchService,
    listener: socket.socket,
    *,
    on_ready: Callable[[], None] = lambda: None,
    on_stop: Callable[[], None] = lambda: None,
) -> None:
    """Answers until SIGTERM or SIGINT; SIGHUP loads the index again.

    The port answers at once, `/health` with the progress of loading. on_stop: called when the
    server is asked to stop, and at its end. Raises what loading the index raises, and what on_ready
    raises."""
    allow_many_files()

    def stop() -> None:
        service.stop()
        on_stop()
        server.should_exit = True

    life = Life(service, stop, on_ready=on_ready)
    server = _Alone(server_config(SearchApp(service, life.run)))
    server.stop = stop
    try:
        server.run([listener])
    finally:
        on_stop()
    if service.problem is not None:
        raise service.problem


# ---------------------------------------------------------------- several


def serve_by_workers(
    setup: ServerSetup,
    listener: socket.socket,
    *,
    on_ready: Callable[[], None],
    on_stop: Callable[[], None],
) -> None:
    """As `serve`, by several processes. Raises ConfigError for a retriever that they cannot have,
    DataError with what the first of them found wrong, what on_ready raises."""
    check_sharable(setup.source.retriever, setup.processes)
    os.environ["OMP_NUM_THREADS"] = str(max(1, own_threads() // setup.processes))
    os.environ["PYTHONSAFEPATH"] = "1"  # what lies where the user stands is not imported
    app = functools.partial(make_worker, setup)
    options = {"workers": setup.processes, "timeout_worker_healthcheck": HUNG_S}
    supervisor = _Supervisor(server_config(app, factory=True, **options), [listener])
    supervisor.tell(setup, on_ready, on_stop)
    supervisor.run()
    problem = setup.folder / PROBLEM
    if problem.exists():
        config, text = json.loads(problem.read_text())
        raise (ConfigError if config else DataError)(text)


class _Process(Process):
    """uvicorn's. It is hung where it does not answer in time, but not before its first answer:
    where modules come slowly, a start takes a minute."""

    def start(self) -> None:
        super().start()
        self._begun, self._answered, self._said = time.monotonic(), False, False
        self.parent_conn.send(b"ping")

    def is_alive(self, timeout: float = HUNG_S) -> bool:
        if self._answered:
            return super().is_alive(timeout)
        if not self.process.is_alive():
            return False
        with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
            if self.parent_conn.poll():
                self.parent_conn.recv()
                self._answered = True
        waited_s = time.monotonic() - self._begun
        if not self._answered and waited_s > START_WORD_S and not self._said:
            self._said = True
            logger.warning("process %d is still starting after %.0f s", self.pid, waited_s)
        return self._answered or waited_s < START_S

    @property
    def never_answered(self) -> bool:
        """Whether it ran for START_S without its first answer."""
        return not self._answered and time.monotonic() - self._begun >= START_S

    def wait_until_ready(self, timeout: float, should_exit: threading.Event | None = None) -> bool:
        self._answered = super().wait_until_ready(timeout, should_exit)
        return self._answered


class _Supervisor(Multiprocess):
    """uvicorn's. SIGHUP, also from a process that was asked for a reload, has new processes take
    the places of all, one after the other: none of them if the first cannot load."""

    processes: list[_Process]  # type: ignore[assignment]
    _told = False

    def tell(
        self, setup: ServerSetup, on_ready: Callable[[], None], on_stop: Callable[[], None]
    ) -> None:
        self._shared, self._folder = SharedState(setup.folder, setup.processes), setup.folder
        self._on_ready, self._on_stop = on_ready, on_stop

    def init_processes(self) -> None:
        self.processes += [self._started() for _ in range(self.processes_num)]

    def _started(self) -> _Process:
        process = _Process(self.config, self.sockets)
        process.start()
        return process

    def keep_subprocess_alive(self) -> None:
        """Replaces processes that died or hang; ends the server where its first ones cannot
        start."""
        for place, process in enumerate(self.processes):
            process.child_conn.close()  # ours: else a ping to a process that dies waits in vain
            if self.should_exit.is_set():
                return
            if process.is_alive(HUNG_S):
                continue
            late = process.never_answered
            process.kill()
            process.join()
            if late and not self._shared.started():
                why = f"a process did not start within {START_S:g} s"
                told = [False, f"{why}: its modules load too slowly; try --processes 1."]
                write_text(self._folder / PROBLEM, json.dumps(told), durable=False)
            if process.exitcode == STARTUP_FAILURE or (self._folder / PROBLEM).exists():
                self.should_exit.set()
                return
            logger.error("process %d died: another one takes its place", process.pid)
            self.processes[place] = self._started()
            self._shared.forget(process.pid, died=True)
        if not self._told and self._shared.started() and not self.should_exit.is_set():
            self._told = True
            self._on_ready()

    def restart_all(self) -> None:
        changes, asked = (self._folder / name for name in (CHANGES, ASKED))
        former = changes.read_text() if changes.exists() else "{}"
        if asked.exists():
            asked.replace(changes)
        for place, old in enumerate(self.processes):
            new = self._started()
            if not new.wait_until_ready(LOAD_S, self.should_exit):
                new.kill()
                new.join()
                self._shared.forget(new.pid, died=False)
                write_text(changes, former, durable=False)
                logger.error("reload failed: the new process %d did not get ready", new.pid)
                return
            os.kill(old.pid, signal.SIGUSR1)
            time.sleep(DRAIN_S)
            old.terminate()
            _join(old, LAST_RESORT_S)
            self._shared.forget(old.pid, died=False)
            self.processes[place] = new

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
            _join(process, end - time.monotonic())


def _join(process: Process, seconds: float) -> None:
    """Waits for the end of a process, and makes it."""
    process.process.join(max(0.0, seconds))
    process.process.kill()
    process.process.join()


def make_worker(setup: ServerSetup) -> SearchApp:
    """The application of one process, where uvicorn calls it."""
    log_to_stderr()
    allow_many_files()
    shared = SharedState(setup.folder, setup.processes)
    shared.join()

    def replace_all(changes: Mapping[str, Any]) -> None:
        write_text(setup.folder / ASKED, json.dumps(changes), durable=False)
        os.kill(os.getppid(), signal.SIGHUP)

    def load(changes: Mapping[str, Any], *reports: Any) -> Any:
        kept = setup.folder / CHANGES
        made = setup.source.changed(json.loads(kept.read_text()) if kept.exists() else {})
        return made.load(changes, *reports)

    service = setup.service(shared=shared, replace_all=replace_all)
    service._load = load

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
    if not retriever_facts(retriever).shared:
        raise ConfigError(
            f"--processes {processes}: the retriever {retriever['name']} is a connection; several "
            "processes cannot share it. Use --processes 1, or several servers."
        )
    if retriever.get("gpu"):
        raise ConfigError(
            f"--processes {processes}: the index is on a GPU, and each process would put a copy "
            "there. Use --processes 1."
        )
