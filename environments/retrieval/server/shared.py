"""What the processes of one server know of each other: a table in a file that all of them map."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.multiprocess import mark_process_dead

from rlflow.errors import DataError
from rlflow.storage.files import write_text
from rlflow.storage.memory_folders import lock
from rlflow_environments.retrieval.server.statistics import FIELDS, KEPT

LOOK_S = 0.1
LOAD_S = 3600.0  # for the other processes to load what one of them could load
SWITCH_S = 30.0

WORKER = np.dtype(
    [(name, "<i8") for name in ("pid", "ready", "connections", "waiting", "loaded", "serving")]
)
"""Of one process. loaded: the newest generation that it tried to load, negative where it could not.
serving: the generation that it answers with."""
SERVER = np.dtype([(name, "<i8") for name in ("issued", "asked", "serving", "restarts", "started")])
"""Of all. asked: the generation that all are to load. serving: the one that all are to answer
with."""
TABLE = "processes"


class BusyError(Exception):
    """Another process reloads."""


class SharedState:
    """The table of one server, and this process's row of it.

    A reload makes a generation: the process that was asked for it loads the index and asks the
    others, and only when all have it in memory does any of them answer with it.
    """

    def __init__(self, folder: Path, processes: int) -> None:
        """The first one in the folder makes the table."""
        path = folder / TABLE
        requests = (processes, KEPT, FIELDS)
        length = SERVER.itemsize + processes * WORKER.itemsize
        if not path.exists():
            path.touch()
            os.truncate(path, length + 8 * math.prod(requests))
        self._folder = folder
        self._all = np.memmap(path, SERVER, "r+", shape=(1,))
        self._workers = np.memmap(path, WORKER, "r+", SERVER.itemsize, (processes,))
        self.recent = np.asarray(np.memmap(path, np.float64, "r+", length, requests))
        """Each process's latest requests, see ServerStatistics."""
        self.place = 0
        self._row = self._workers[:1]

    def join(self) -> None:
        """Takes a row that no living process has: the kernel frees its lock with the process."""
        self.place = next(place for place in range(len(self._workers)) if self._take(place))
        self._row = self._workers[self.place : self.place + 1]
        if former := int(self._row["pid"][0]):
            mark_process_dead(former)
            self._all["restarts"] += 1
        self._row[:] = 0
        self._row["pid"] = os.getpid()
        self._row["loaded"] = self._row["serving"] = self._all["serving"]

    def _take(self, place: int) -> bool:
        self._lock = (self._folder / f"place-{place}").open("wb")
        return lock(self._lock.fileno(), fcntl.LOCK_EX)

    def tell(self, **values: int) -> None:
        """Writes fields of this process's row."""
        for name, value in values.items():
            self._row[name] = value

    # ------------------------------------------------------------ what the processes are doing

    def ready(self) -> np.ndarray:
        """The rows of the processes that answer."""
        return self._workers[self._workers["ready"] == 1]

    def started(self) -> bool:
        """Whether all of them were ready at a time."""
        if len(self.ready()) == len(self._workers):
            self._all["started"] = 1
        return bool(self._all["started"][0])

    def waiting(self) -> int:
        """How many searches wait in all processes."""
        return int(self.ready()["waiting"].sum())

    def excess(self) -> int:
        """Connections that are to leave this process: half of those above its share, where they are
        more than a quarter of it."""
        ready = self.ready()
        if len(ready) < 2:
            return 0
        fair = -(-int(ready["connections"].sum()) // len(ready))
        above = int(self._row["connections"][0]) - fair
        return -(-above // 2) if above > fair // 4 else 0

    def report(self) -> dict[str, Any]:
        """What `/health` says of the processes."""
        names = ("pid", "ready", "connections", "waiting")
        rows = [{name: int(row[name]) for name in names} for row in self._workers if row["pid"]]
        processes = [{**row, "ready": bool(row["ready"])} for row in rows]
        return {"processes": processes, "restarts": int(self._all["restarts"][0])}

    # ------------------------------------------------------------ a reload: by who is asked for it

    @contextlib.contextmanager
    def reloading(self, changes: Mapping[str, Any]) -> Iterator[int]:
        """The number of a new generation with these changes. Raises BusyError."""
        with (self._folder / "reload").open("wb") as turn:
            if not lock(turn.fileno(), fcntl.LOCK_EX):
                raise BusyError
            self._all["issued"] += 1
            number = int(self._all["issued"][0])
            write_text(self._changes(number), json.dumps(changes), durable=False)
            try:
                yield number
            finally:
                self._all["asked"] = self._all["serving"]

    async def all_load(self, number: int) -> None:
        """Returns when every process has loaded the generation. Raises DataError where one
        cannot."""
        self._row["loaded"] = number
        self._all["asked"] = number
        await self._until(lambda rows: (abs(rows["loaded"]) == number).all(), LOAD_S)
        if (self.ready()["loaded"] == -number).any():
            raise DataError("another process of this server could not load it; its log says why.")

    async def all_serve(self, number: int) -> None:
        """Returns when every process answers with the generation."""
        self._row["serving"] = number
        self._all["serving"] = number
        await self._until(lambda rows: (rows["serving"] >= number).all(), SWITCH_S)

    async def _until(self, done: Callable[[np.ndarray], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not done(self.ready()):
            if time.monotonic() > end:
                raise DataError(f"other processes of this server did not follow in {seconds:g} s.")
            await asyncio.sleep(LOOK_S)

    # ------------------------------------------------------------ a reload: by the others

    @property
    def serving(self) -> int:
        """The generation that all are to answer with."""
        return int(self._all["serving"][0])

    @property
    def asked(self) -> int:
        """The generation that all are to have in memory."""
        return int(self._all["asked"][0])

    @property
    def behind(self) -> int | None:
        """The generation that this process has to load, None where there is none."""
        newest = max(self.asked, self.serving)
        return newest if abs(int(self._row["loaded"][0])) < newest else None

    def changes(self, number: int) -> dict[str, Any]:
        """Those of a generation; of the first one there are none."""
        return json.loads(self._changes(number).read_text()) if number else {}

    def _changes(self, number: int) -> Path:
        return self._folder / f"changes-{number}.json"
