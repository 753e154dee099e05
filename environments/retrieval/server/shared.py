"""A table of the processes of one server, in a file that all of them map."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.multiprocess import mark_process_dead

from rlflow.storage.memory_folders import lock

NAMES = ("pid", "ready", "connections", "waiting")
WORKER = np.dtype([(name, "<i8") for name in NAMES])
SERVER = np.dtype([("restarts", "<i8"), ("started", "<i8")])
TABLE, PLACES = "processes", 2  # places per process: at a reload a new one stands beside the old


class SharedState:
    """The table of one server, and this process's row of it."""

    def __init__(self, folder: Path, processes: int) -> None:
        """The first one in the folder makes the table."""
        path, self._processes, self._folder = folder / TABLE, processes, folder
        if not path.exists():
            path.touch()
            os.truncate(path, SERVER.itemsize + PLACES * processes * WORKER.itemsize)
        self._all = np.memmap(path, SERVER, "r+", shape=(1,))
        shape = (PLACES * processes,)
        self._workers = np.memmap(path, WORKER, "r+", SERVER.itemsize, shape)
        self._row = self._workers[:1]

    def join(self) -> None:
        """Takes a row that no living process has: the kernel frees its lock with the process."""
        place = next(place for place in range(len(self._workers)) if self._take(place))
        self._row = self._workers[place : place + 1]
        self._row[:] = 0
        self._row["pid"] = os.getpid()

    def _take(self, place: int) -> bool:
        self._lock = (self._folder / f"place-{place}").open("wb")
        return lock(self._lock.fileno(), fcntl.LOCK_EX)

    def forget(self, pid: int, died: bool) -> None:
        """A process has ended. died: by itself."""
        mark_process_dead(pid)
        self._workers[self._workers["pid"] == pid] = 0
        self._all["restarts"] += died

    def tell(self, **values: int) -> None:
        """Writes fields of this process's row."""
        for name, value in values.items():
            self._row[name] = value

    def ready(self) -> np.ndarray:
        """The rows of the processes that answer."""
        return self._workers[self._workers["ready"] == 1]

    def started(self) -> bool:
        """Whether all of them were ready at a time."""
        if len(self.ready()) >= self._processes:
            self._all["started"] = 1
        return bool(self._all["started"][0])

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
        rows = [{name: int(row[name]) for name in NAMES} for row in self._workers if row["pid"]]
        processes = [{**row, "ready": bool(row["ready"])} for row in rows]
        return {"processes": processes, "restarts": int(self._all["restarts"][0])}
