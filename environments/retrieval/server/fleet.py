"""Several processes behind one port: the one that accepts connections, and answers for all what is no search."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.multiprocess import mark_process_dead

from rlflow.errors import ConfigError, DataError, RLFlowError
from rlflow.http import backoff_s
from rlflow_environments.retrieval.server.app import make_api
from rlflow_environments.retrieval.server.channel import Channel, Message, channel_pair
from rlflow_environments.retrieval.server.index import Answer
from rlflow_environments.retrieval.server.loading import ServedSource
from rlflow_environments.retrieval.server.moving import Movers
from rlflow_environments.retrieval.server.service import LoadProgress, SearchService, ServiceLimits, Unavailable
from rlflow_environments.retrieval.server.threads import own_threads
from rlflow_environments.retrieval.server.worker import THREADS

logger = logging.getLogger(__name__)

START_S = 60.0  # for a copy of a process that has everything already
RETIRE_S = 5.0
CLOSE_S = 6.0  # the processes themselves take at most 4
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 30.0  # before a process that died is replaced
STEADY_S = 300.0  # after which a death counts as the first
REAPED_S = 2.0  # for a loading process that has nothing left to do
UNSHARED = ("qdrant", "http")


@dataclasses.dataclass(eq=False)
class Member:
    """A process that answers."""

    place: int
    channel: Channel
    pid: int = 0
    connections: int = 0
    waiting: int = 0
    ready: bool = False
    retired: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)


class Fleet:
    """What starts and watches the processes. `load` is what a SearchService loads with."""

    def __init__(
        self, source: ServedSource, limits: ServiceLimits, query_log: str | None, processes: int, folder: Path
    ) -> None:
        """folder: for what the processes share. Raises ConfigError for a retriever that several processes cannot have."""
        check_sharable(source.retriever, processes)
        shared = {key: -(-source.options[key] // processes) for key in ("max_waiting", "cache_bytes") if key in source.options}
        self.source = dataclasses.replace(source, options={**source.options, **shared})
        self.processes = processes
        self.movers = Movers()
        self.service: SearchService | None = None
        self.restarts = 0
        self._setup = {
            "source": dataclasses.asdict(self.source),
            "limits": dataclasses.asdict(limits),
            "query_log": query_log,
            "folder": str(folder),
            "processes": processes,
            "threads": max(1, own_threads() // processes),
        }
        self._loaders: list[subprocess.Popen[bytes]] = []
        self._current: Generation | None = None

    def load(self, changes: Mapping[str, Any], report: LoadProgress, on_batch: Any) -> Generation:
        """Processes with the index, all of them ready. Raises RLFlowError."""
        check_sharable(self.source.changed(changes).retriever, self.processes)
        ours, theirs = channel_pair()
        loader = subprocess.Popen(
            [sys.executable, "-P", "-m", "rlflow_environments.retrieval.server.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **dict.fromkeys(THREADS, "1"), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            process_group=0,  # Ctrl-C is for this process; of the same session, whose processes the scheduler weighs together
        )
        theirs.close()
        self._loaders.append(loader)
        try:
            ours.send("setup", changes=dict(changes), **self._setup)
            loaded = _loaded(ours, report)
            report("starting the processes", 0.0)
            members = [_first_member(place, ours) for place in range(self.processes)]
        except RLFlowError:
            loader.kill()
            loader.wait()
            raise
        return Generation(self, ours, loaded, members, changes)

    def take(self, generation: Generation) -> None:
        """From now on connections go to this one."""
        self._current = generation
        self.movers.go(self.offer)

    def offer(self, descriptor: int) -> bool:
        """Whether a process takes the connection: the one with the fewest."""
        return self._current is not None and self._current.offer(descriptor)

    def replace(self, generation: Generation) -> None:
        """The loading process of a generation died: another generation is loaded in its place."""
        asyncio.get_running_loop().call_later(1.0, self._reap)
        if generation is self._current:
            logger.error("the process that loaded the index is gone; it is loaded again")
            generation.start(self._replace(generation))

    async def _replace(self, generation: Generation) -> None:
        failures = 0
        while generation is self._current and self.service is not None:
            failures += 1
            await asyncio.sleep(backoff_s(FIRST_PAUSE_S, LONGEST_PAUSE_S, failures))
            with contextlib.suppress(RLFlowError, Unavailable):  # logged and counted; the processes that there are go on
                await self.service.reload(generation.changes)

    def _reap(self) -> None:
        self._loaders = [process for process in self._loaders if process.poll() is None]

    def end(self) -> None:
        """Ends whatever is left, by force."""
        for process in self._loaders:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(REAPED_S)
            process.kill()
            process.wait()


class Generation:
    """The processes that have one index, and the one that they are copies of. See Served."""

    size: int | None = None

    def __init__(
        self, fleet: Fleet, loader: Channel, loaded: Message, members: Sequence[Member], changes: Mapping[str, Any]
    ) -> None:
        self.info: dict[str, Any] = loaded["info"]
        self.has_pages: bool = loaded["has_pages"]
        self.changes = changes
        self._fleet, self._loader = fleet, loader
        self._members = list(members)
        self._deaths: dict[int, list[float]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._api: Any = None
        self._over = False

    @property
    def waiting(self) -> int:
        """See Served."""
        return sum(member.waiting for member in self._members)

    async def answer(self, queries: Sequence[str], top_k: int, wait_s: float) -> Answer:
        """Raises Unavailable: this process searches nothing; none of the others was there to take the connection."""
        raise Unavailable("no process is ready; they are being started.", status=503)

    def page(self, url: str) -> bytes | None:
        """As `answer`."""
        raise Unavailable("no process is ready; they are being started.", status=503)

    def report(self) -> dict[str, Any]:
        """See Served."""
        processes = [
            {"pid": member.pid, "ready": member.ready, "connections": member.connections, "waiting": member.waiting}
            for member in sorted(self._members, key=lambda member: member.place)
        ]
        return {"processes": processes, "restarts": self._fleet.restarts}

    def begin(self) -> None:
        """See Served."""
        assert self._fleet.service is not None
        self._api = make_api(self._fleet.service)
        self._loader.listen(lambda message, descriptor: None, lambda: self._fleet.replace(self))
        for member in self._members:
            self._listen(member)
        self._fleet.take(self)

    async def retire(self) -> None:
        """See Served. A process that does not say that it takes no more requests is killed."""
        self._over = True
        for member in self._members:
            member.channel.send("retire")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(member.retired.wait() for member in self._members)), RETIRE_S)
        for member in self._members:
            if not member.retired.is_set():
                _kill(member)
        self._loader.send("end")

    async def close(self) -> None:
        """See Served."""
        self._over = True
        for member in self._members:
            member.channel.send("stop")
        end = time.monotonic() + CLOSE_S
        while self._members and time.monotonic() < end:
            await asyncio.sleep(0.02)
        for member in self._members:
            _kill(member)
        self._loader.close()
        for task in self._tasks:
            task.cancel()

    def offer(self, descriptor: int) -> bool:
        """Whether one of the processes takes the connection."""
        for member in sorted(self._members, key=lambda member: member.connections):
            if member.ready and member.channel.send("connection", descriptors=[descriptor]):
                member.connections += 1
                return True
        return False

    def start(self, coroutine: Any) -> None:
        """Runs it beside."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _listen(self, member: Member) -> None:
        member.channel.listen(lambda *found: self._on_message(member, *found), lambda: self._on_end(member))

    def _on_message(self, member: Member, message: Message, descriptor: int | None) -> None:
        kind = message["kind"]
        if descriptor is not None:  # a connection that the process hands on
            self._fleet.offer(descriptor)
            os.close(descriptor)
        elif kind == "report":
            member.connections, member.waiting = message["connections"], message["waiting"]
        elif kind == "ready":
            member.pid, member.ready = message["pid"], True
            self._share_out(member)
        elif kind == "retired":
            member.retired.set()
        elif kind == "ask":
            self.start(self._answer(member, message))

    def _share_out(self, new: Member) -> None:
        """Connections that another process took while this one was away come back to it, or stay where they are welcome."""
        self._fleet.take(self)
        fair = -(-sum(member.connections for member in self._members) // len(self._members))
        for member in self._members:
            if member is not new and member.connections > fair:
                member.channel.send("shed", count=member.connections - fair)

    def _on_end(self, member: Member) -> None:
        self._members.remove(member)
        member.retired.set()
        mark_process_dead(member.pid)
        if self._over:
            return
        self._fleet.restarts += 1
        deaths = [at for at in self._deaths.get(member.place, []) if time.monotonic() - at < STEADY_S]
        self._deaths[member.place] = [*deaths, time.monotonic()]
        pause_s = backoff_s(FIRST_PAUSE_S, LONGEST_PAUSE_S, len(deaths) + 1)
        logger.error("process %d died: another one takes its place in %.1f s", member.pid, pause_s)
        self.start(self._restart(member.place, pause_s))

    async def _restart(self, place: int, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        if not self._over:
            member = _copy(place, self._loader)
            self._members.append(member)
            self._listen(member)

    async def _answer(self, member: Member, asked: Message) -> None:
        status, headers, body = await _run(self._api, asked)
        number, text = asked["number"], body.decode("utf-8", "replace")
        if not member.channel.send("answer", number=number, status=status, headers=headers, body=text):
            member.channel.send("answer", number=number, status=500, headers=[], body='{"detail": "the answer is too large."}')


def check_sharable(retriever: Mapping[str, Any], processes: int) -> None:
    """Raises ConfigError for a retriever that several processes of one server cannot have."""
    if not sys.platform.startswith("linux"):
        raise ConfigError(f"--processes {processes}: needs Linux. Use --processes 1, or several servers.")
    if retriever.get("name") in UNSHARED:
        raise ConfigError(
            f"--processes {processes}: the retriever {retriever['name']} is a connection, or a folder that one process may open; "
            "several processes cannot share it. Use --processes 1, or several servers."
        )


def _loaded(loader: Channel, report: LoadProgress) -> Message:
    """What the loading process says when it has loaded. Raises ConfigError, DataError."""
    while True:
        found = loader.receive()
        if found is None:
            raise DataError("the process that loads the index died: killed for memory? Its last words stand above.")
        message = found[0]
        if message["kind"] == "progress":
            report(message["stage"], message["share"])
        elif message["kind"] == "failed":
            raise (ConfigError if message["config"] else DataError)(message["problem"])
        else:
            return message


def _copy(place: int, loader: Channel) -> Member:
    ours, theirs = channel_pair()
    loader.send("fork", descriptors=[theirs.fileno()], place=place)
    theirs.close()
    return Member(place, ours)


def _first_member(place: int, loader: Channel) -> Member:
    """A process that is ready. Raises DataError where it ends before."""
    member = _copy(place, loader)
    found = member.channel.receive(START_S)
    if found is None:
        raise DataError(f"process {place} of the server ended before it was ready.")
    member.pid, member.ready = found[0]["pid"], True
    return member


def _kill(member: Member) -> None:
    if member.pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member.pid, 9)


async def _run(api: Any, asked: Message) -> tuple[int, list[tuple[str, str]], bytes]:
    """The answer of an ASGI application to a request that another process took: (status, headers, body)."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "scheme": "http",
        "root_path": "",
        "raw_path": asked["path"].encode(),
        "query_string": asked["query"].encode("latin-1"),
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in asked["headers"]],
        **{key: asked[key] for key in ("method", "path", "http_version")},
        "client": tuple(asked["client"]) if asked["client"] else None,
        "server": None,
    }
    sent: list[Message] = []
    request = {"type": "http.request", "body": asked["body"].encode("utf-8", "surrogatepass"), "more_body": False}

    async def receive() -> Message:
        return request

    async def send(message: Message) -> None:
        sent.append(message)

    try:
        await api(scope, receive, send)
    except Exception:
        logger.exception("%s failed", asked["path"])
    if not sent:
        return 500, [], b"{}"
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in sent[0]["headers"]]
    return sent[0]["status"], headers, b"".join(message.get("body", b"") for message in sent[1:])
