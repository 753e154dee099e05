"""The server as a process: its signals, its life from the first byte to the last."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import uvicorn

from rlflow.errors import RLFlowError
from rlflow_environments.retrieval.server.app import SearchApp
from rlflow_environments.retrieval.server.connections import ImpatientProtocol, allow_many_files
from rlflow_environments.retrieval.server.discovery import DiscoveryFile
from rlflow_environments.retrieval.server.listener import BACKLOG
from rlflow_environments.retrieval.server.service import SearchService, Unavailable

logger = logging.getLogger(__name__)

GRACE_S = 4  # for answers that are under way when the server is asked to stop
LAST_RESORT_S = 8.0  # after that: the process ends, whatever it does
WATCH_S = 0.25


def serve(
    service: SearchService,
    listener: socket.socket,
    *,
    discovery: DiscoveryFile | None = None,
    parent: int | None = None,
    on_ready: Callable[[], None] = lambda: None,
    last_resort: bool = False,
    protocol: Callable[..., asyncio.Protocol] = ImpatientProtocol,
) -> None:
    """Answers until SIGTERM or SIGINT; SIGHUP loads the index again.

    The port answers at once, `/health` with the progress of loading. discovery: there while the server can answer.
    parent: the process whose end ends the server too. last_resort: the process may be ended without ceremony where a search
    that cannot be interrupted would keep it longer than 10 s. protocol: of a connection. Raises what loading the index raises.
    """
    import uvloop

    allow_many_files()
    server = uvicorn.Server(server_config(SearchApp(service), protocol))
    life = _Life(service, server, discovery, parent, on_ready, last_resort)
    with _signals(life), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(life.run(listener))
    if service.problem is not None:
        raise service.problem


def server_config(app: SearchApp, protocol: Callable[..., asyncio.Protocol]) -> uvicorn.Config:
    """How uvicorn serves. protocol: of a connection."""
    return uvicorn.Config(
        app,
        http=protocol,  # type: ignore[arg-type]
        log_level="warning",
        access_log=False,  # a line per request slows rollouts down; the query log is buffered
        lifespan="off",
        ws="none",
        proxy_headers=False,  # costs time, and would let a header say who is local
        timeout_graceful_shutdown=GRACE_S,
        backlog=BACKLOG,
    )


class _Life:
    """One server from its start to its end."""

    def __init__(
        self,
        service: SearchService,
        server: uvicorn.Server,
        discovery: DiscoveryFile | None,
        parent: int | None,
        on_ready: Callable[[], None],
        last_resort: bool,
    ) -> None:
        self.service = service
        self.server = server
        self.stop_requested = False
        self.reload_requested = False
        self._discovery = discovery
        self._parent = parent
        self._on_ready = on_ready
        self._last_resort = last_resort
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, listener: socket.socket) -> None:
        """Loads and answers until it is asked to stop."""
        self._start(self._load())
        self._start(self._watch())
        try:
            await self.server.serve(sockets=[listener])
        finally:
            self._withdraw()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self.service.close()

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self) -> None:
        try:
            await self.service.load()
            if self.stop_requested:
                return
            if self._discovery is not None:
                self._discovery.write()
        except Exception as problem:  # noqa: BLE001 -- `serve` raises it when the server has ended
            self.service.fail(problem)
            self.stop_requested = True
            return
        self._on_ready()

    async def _reload(self) -> None:
        with contextlib.suppress(RLFlowError, OSError, Unavailable):  # all are logged and counted; the index stays
            await self.service.reload({})

    async def _watch(self) -> None:
        """Looks around several times a second: stop, reload, the parent's end."""
        while not (self.stop_requested or self.server.should_exit):
            if self._parent is not None and os.getppid() != self._parent:
                logger.warning("the process %d that started this server is gone: stopping", self._parent)
                break
            if self.reload_requested:
                self.reload_requested = False
                self._start(self._reload())
            if self.service.query_log is not None:
                self.service.query_log.flush()
            await asyncio.sleep(WATCH_S)
        self._withdraw()
        self.server.should_exit = True
        if self._last_resort:
            end_at_last()

    def _withdraw(self) -> None:
        """No new client finds this server from now on."""
        self.service.stop()
        if self._discovery is not None:
            self._discovery.remove()


def end_at_last() -> None:
    """Ends this process in LAST_RESORT_S seconds, whatever it does."""
    timer = threading.Timer(LAST_RESORT_S, os._exit, [0])
    timer.daemon = True
    timer.start()


@contextlib.contextmanager
def _signals(life: _Life) -> Iterator[None]:
    """SIGTERM and SIGINT stop, SIGHUP reloads; outside the main thread signals stay as they are.

    uvicorn handles the first two itself while it runs and raises them once more when it has ended: then they change nothing.
    """

    def stop(number: int, frame: object) -> None:
        life.stop_requested = True

    def reload(number: int, frame: object) -> None:
        life.reload_requested = True

    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number, handler in ((signal.SIGTERM, stop), (signal.SIGINT, stop), (signal.SIGHUP, reload)):
            previous[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
