"""A server's process: what it does from uvicorn's start to its end."""

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
from rlflow_environments.retrieval.server.app import Receive, SearchApp, Send
from rlflow_environments.retrieval.server.connections import ImpatientProtocol, allow_many_files
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
    parent: int | None = None,
    on_ready: Callable[[], None] = lambda: None,
    on_stop: Callable[[], None] = lambda: None,
    last_resort: bool = False,
) -> None:
    """Answers until SIGTERM or SIGINT; SIGHUP loads the index again.

    The port answers at once, `/health` with the progress of loading. parent: the process whose end
    ends the server too. on_stop: called when the server is asked to stop. last_resort: the process
    may be ended without ceremony where a search that cannot be interrupted would keep it longer
    than 10 s. Raises what loading the index raises, and what on_ready raises.
    """
    allow_many_files()

    def stop() -> None:
        server.should_exit = True

    def stopping() -> bool:
        if server.should_exit:
            on_stop()
            if last_resort:
                end_at_last()
        return server.should_exit

    life = Life(service, stop, stopping, parent=parent, on_ready=on_ready)
    server = uvicorn.Server(server_config(SearchApp(service, life.run)))
    try:
        with _signals(stop):
            server.run([listener])
    finally:
        on_stop()  # again: the end may come before the next look
    if service.problem is not None:
        raise service.problem


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


class Life:
    """uvicorn's lifespan: loading, looking around several times a second, the end."""

    def __init__(
        self,
        service: SearchService,
        stop: Callable[[], None],
        stopping: Callable[[], bool] = lambda: False,
        *,
        parent: int | None = None,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """stop: asks uvicorn to end. stopping: whether it was asked to, where that is known."""
        self.stop, self._stopping = stop, stopping
        self._service = service
        self._parent = parent
        self._on_ready = on_ready
        self._reload_requested = False
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, app: SearchApp, receive: Receive, send: Send) -> None:
        """The messages of the lifespan protocol."""
        await receive()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGHUP, self._request_reload)
        shared = self._service.shared
        if shared is not None and shared.started():
            await self._load()  # others answer meanwhile: connections come when this one can, too
        else:
            self._start(self._load())
        self._start(self._watch(app))
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self._service.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._service.query_log is not None:
            self._service.query_log.close()
        await send({"type": "lifespan.shutdown.complete"})

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self) -> None:
        try:
            await self._service.load()
            if not self._stopping():
                self._on_ready()
        except Exception as problem:  # noqa: BLE001 -- raised when the server has ended
            self._service.fail(problem)
            self.stop()

    def _request_reload(self, number: int, frame: object) -> None:
        self._reload_requested = True

    async def _reload(self) -> None:
        with contextlib.suppress(RLFlowError, OSError, Unavailable):  # logged and counted
            await self._service.reload({})

    async def _watch(self, app: SearchApp) -> None:
        service = self._service
        while not self._stopping():
            if self._parent is not None and os.getppid() != self._parent:
                logger.warning("the process %d that started this server is gone", self._parent)
                self.stop()
            if self._reload_requested:
                self._reload_requested = False
                self._start(self._reload())
            if service.query_log is not None:
                service.query_log.flush()
            service.tell(len(app.connections))
            if service.shared is not None:
                app.excess = service.shared.excess()
                if service.state == "ready":
                    self._start(service.follow(service.shared))
            await asyncio.sleep(WATCH_S)
        service.stop()


def end_at_last() -> None:
    """Ends this process in LAST_RESORT_S seconds, whatever it does."""
    timer = threading.Timer(LAST_RESORT_S, os._exit, [0])
    timer.daemon = True
    timer.start()


@contextlib.contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and SIGINT stop; outside the main thread signals stay as they are.

    uvicorn handles them itself while it runs, and raises them once more when it has ended."""
    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            previous[number] = signal.signal(number, lambda number, frame: stop())
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
