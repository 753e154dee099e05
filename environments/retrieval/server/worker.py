"""The processes that answer, where there are several: one loads the index, and is copied as often as there are to be processes.

The copies share its memory (fork, copy on write), whatever the index, its encoder and the corpus keep there, and a process that
died is replaced in milliseconds. The loading process therefore runs on one thread: a copy would lack the others.

    python -m rlflow_environments.retrieval.server.worker DESCRIPTOR      # of its channel to `fleet.Fleet`
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from rlflow.errors import ConfigError, RLFlowError
from rlflow_environments.common.commands import log_to_stderr
from rlflow_environments.retrieval.server.app import Receive, Scope, SearchApp, Send, read_body
from rlflow_environments.retrieval.server.channel import Channel, Message, channel_of
from rlflow_environments.retrieval.server.connections import allow_many_files
from rlflow_environments.retrieval.server.index import ServedIndex
from rlflow_environments.retrieval.server.loading import ServedSource
from rlflow_environments.retrieval.server.moving import Movers, MovingProtocol, take_over
from rlflow_environments.retrieval.server.process import WATCH_S, end_at_last, server_config
from rlflow_environments.retrieval.server.query_log import QueryLog
from rlflow_environments.retrieval.server.service import SearchService, ServiceLimits
from rlflow_environments.retrieval.server.statistics import ServerStatistics, shared_table
from rlflow_environments.retrieval.server.wire import BadRequest, write_error

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""What the loading process may use one of."""
ASKED_BYTES = 1 << 16
QUIET_S = 2.0
REAP_S = 0.5


def main(descriptor: int) -> None:
    """Loads, then makes a copy of this process for every message that asks for one, until its channel ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    log_to_stderr()
    channel = channel_of(descriptor)
    found = channel.receive()
    if found is None:
        return
    setup = found[0]
    counting: list[ServerStatistics] = []  # of the copy

    def on_batch(size: int, seconds: float) -> None:
        counting[0].batch(size, seconds)

    def report(stage: str, share: float) -> None:
        if not channel.send("progress", stage=stage, share=share):
            os._exit(1)  # nobody waits for it

    try:
        index = _load(setup, report, on_batch)
    except RLFlowError as problem:
        channel.send("failed", problem=str(problem), config=isinstance(problem, ConfigError))
        return
    channel.send("loaded", info=index.info, has_pages=index.has_pages)
    _copy_on_demand(channel, setup, index, counting)


def _load(setup: Message, report: Callable[[str, float], None], on_batch: Callable[[int, float], None]) -> ServedIndex:
    with contextlib.suppress(ImportError):
        import tqdm

        tqdm.tqdm.monitor_interval = 0  # its thread
    index = ServedSource(**setup["source"]).load(setup["changes"], report, on_batch)
    end = time.monotonic() + QUIET_S
    while (threads := _threads()) > 1:
        if time.monotonic() > end:
            raise ConfigError(
                f"--processes {setup['processes']}: this retriever runs {threads - 1} thread(s) of its own, or a GPU, which "
                "several processes cannot share. Use --processes 1, or several servers."
            )
        time.sleep(0.05)
    gc.collect()
    gc.freeze()  # a collection writes to the objects that it looks at, and their memory would not be shared any more
    return index


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _copy_on_demand(channel: Channel, setup: Message, index: ServedIndex, counting: list[ServerStatistics]) -> None:
    ended = gone = False
    while not ended or _reap():
        if ended or not select.select([channel], [], [], REAP_S)[0]:
            _reap()
            time.sleep(REAP_S if ended else 0)
            continue
        found = channel.receive()
        if found is None or found[0]["kind"] == "end":
            ended = True
            gone = gone or found is None
            continue
        message, descriptor = found
        assert descriptor is not None
        if os.fork() == 0:
            channel.close()
            _answer(channel_of(descriptor), message["place"], setup, index, counting)
        os.close(descriptor)
    if gone:  # nobody else is left to do it
        shutil.rmtree(setup["folder"], ignore_errors=True)


def _reap() -> bool:
    """Whether copies are left, without those that ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def _answer(channel: Channel, place: int, setup: Message, index: ServedIndex, counting: list[ServerStatistics]) -> None:
    """The copy's life; never returns."""
    code = 1
    try:
        os.environ["OMP_NUM_THREADS"] = str(setup["threads"])  # of which the searches take what they need
        allow_many_files()
        statistics = ServerStatistics(shared_table(Path(setup["folder"]), setup["processes"]), place)
        counting.append(statistics)
        log = QueryLog(setup["query_log"]) if setup["query_log"] else None
        service = SearchService(_never, ServiceLimits(**setup["limits"]), log, statistics)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_Worker(channel, service).run(index))
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def _never(changes: Mapping[str, Any], report: Any, on_batch: Any) -> ServedIndex:
    raise ConfigError("an index is loaded by the process that this one is a copy of.")


class _Worker:
    """One process that answers searches; what else is asked for it passes on to the one that knows of all."""

    def __init__(self, channel: Channel, service: SearchService) -> None:
        self._channel, self._service = channel, service
        self._movers = Movers()
        protocol = functools.partial(MovingProtocol, movers=self._movers)
        self._server = uvicorn.Server(server_config(SearchApp(service, self._ask), protocol))
        self._tasks: set[asyncio.Task[Any]] = set()
        self._asked: dict[int, asyncio.Future[Message]] = {}
        self._retired = False

    async def run(self, index: ServedIndex) -> None:
        """Answers until it is told to end, or its connections have moved on, or the channel ends."""
        self._service.stage = "ready"  # nothing to be said of
        self._service.serve(index)
        self._channel.listen(self._on_message, self._on_end)
        self._start(self._watch())
        self._channel.send("ready", pid=os.getpid())
        await self._server.serve(sockets=[])
        if self._service.query_log is not None:
            self._service.query_log.close()

    def _start(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_message(self, message: Message, descriptor: int | None) -> None:
        kind = message["kind"]
        if kind == "connection" and descriptor is not None:
            self._start(take_over(descriptor, self._protocol))
        elif kind == "shed":
            self._movers.go(self._hand_back, message["count"])
        elif kind == "retire":
            self._retired = True
            self._movers.go(self._hand_back)
            self._channel.send("retired")
        elif kind == "answer" and (waiting := self._asked.pop(message["number"], None)) is not None and not waiting.done():
            waiting.set_result(message)
        elif kind == "stop":
            self._server.should_exit = True

    def _on_end(self) -> None:
        self._server.should_exit = True
        end_at_last()

    def _protocol(self) -> asyncio.Protocol:
        state = self._server.server_state
        return self._server.config.http_protocol_class(self._server.config, state, {})  # type: ignore[no-any-return]

    def _hand_back(self, descriptor: int) -> bool:
        return self._channel.send("connection", descriptors=[descriptor])

    async def _watch(self) -> None:
        held = self._server.server_state.connections
        while not self._server.should_exit:
            self._channel.send("report", connections=len(held), waiting=self._service.index.waiting if self._service.index else 0)
            if self._service.query_log is not None:
                self._service.query_log.flush()
            if self._retired and not held and len(self._tasks) == 1:
                self._server.should_exit = True
            await asyncio.sleep(WATCH_S)

    async def _ask(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application: the request is answered by the process that knows of all."""
        try:
            body = await read_body(receive)
            if len(body) > ASKED_BYTES:
                raise BadRequest(f"the body is larger than {ASKED_BYTES} bytes.", status=413)
            answer = await self._answer(scope, body)
        except BadRequest as problem:
            answer = {"status": problem.status, "headers": [], "body": write_error(str(problem)).decode()}
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer["headers"]]
        await send({"type": "http.response.start", "status": answer["status"], "headers": headers})
        await send({"type": "http.response.body", "body": answer["body"].encode()})

    async def _answer(self, scope: Scope, body: bytes) -> Message:
        number = id(scope)
        self._asked[number] = asyncio.get_running_loop().create_future()
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        request = {key: scope[key] for key in ("method", "path", "client", "http_version")}
        sent = self._channel.send(
            "ask", number=number, headers=headers, query=scope["query_string"].decode("latin-1"),
            body=body.decode("utf-8", "replace"), **request,
        )  # fmt: skip
        if not sent:
            raise BadRequest("the server is busy, or ends.", status=503)
        return await self._asked[number]


if __name__ == "__main__":
    main(int(sys.argv[1]))
