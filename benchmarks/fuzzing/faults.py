"""Runs whose environment has one fault that holds a process up: each ends in time, and says what it was."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from fuzzing.cases import Wrong, trained
from fuzzing.task import Letters, settings, write_model
from rlflow.types import Episode, Step, Task

CALL_S = 5.0
DEADLINE_S = 150.0
ORPHANS_LIVE_S = 30.0
FAULTS: dict[str, tuple[tuple[int, ...], str]] = {
    "pool": ((0,), ""),
    "left_pool": ((0,), ""),
    "executor": ((0,), ""),
    "killed_pool": ((0,), ""),  # then the run that comes after it
    "few_places": ((0,), ""),
    "fork": ((0, 2), "forked, and the child came back"),
    "async_fork": ((0, 2), "forked, and the child came back"),
    "hanging_tasks": ((2,), r"Faulty\.tasks\('train'\) did not end within"),
    "hanging_report": ((2,), r"Faulty\.report did not end within"),
    "hanging_shutdown": ((0,), r"Faulty\.shutdown did not end within"),
    "endless_tasks": ((2,), "did not end within|with no end after"),
    "same_ids": ((2,), "tasks [0-5] and 6 have the same id"),
    "held": (
        (-signal.SIGKILL,),
        r"(?s)holds the interpreter, .* in match.*ended: one call has held the interpreter",
    ),
}
"""How a run with each fault may end, and what it says."""


class Faulty(Letters):
    """Letters with one of FAULTS, or none. at: the call of `step` at which it happens, where it happens there."""

    def __init__(self, kind: str = "", at: int = 1, places: int = 2) -> None:
        self._kind, self._at, self._calls = kind, at, itertools.count(1)
        self._places = threading.Semaphore(places)
        self._lock, self._pool = threading.Lock(), None

    def tasks(self, split: str) -> Any:
        tasks = list(super().tasks(split))
        self._hang("tasks")
        if self._kind == "endless_tasks":
            return (Task(f"{split}-{number}", "a?", "a") for number in itertools.count())
        return [*tasks, tasks[self._at % len(tasks)]] if self._kind == "same_ids" else tasks

    def reset(self, task: Task) -> Any:
        if self._kind == "few_places":
            self._places.acquire()
        return Episode(task)

    def step(self, episode: Episode, response: str) -> Any:
        fault = self._kind if next(self._calls) == self._at else ""
        if self._kind == "async_fork":
            return self._forking(episode, response, fault)
        if fault == "fork":
            os.fork()
        if fault == "held":
            re.match("(a+)+$", "a" * 60 + "b")
        shown = self._in_pool("|a?")
        if fault == "killed_pool":
            os.kill(os.getpid(), signal.SIGKILL)
        return Step(
            shown, float(response == episode.task.answer), episode.turns == 2, {"said": 1.0}
        )

    def close(self, episode: Episode) -> None:  # type: ignore[override]
        if self._kind == "few_places":
            self._places.release()

    def report(self) -> dict[str, float]:
        self._hang("report")
        return {}

    def shutdown(self) -> None:
        self._hang("shutdown")
        if self._kind == "pool" and self._pool is not None:
            self._pool.terminate()
            self._pool.join()

    async def _forking(self, episode: Episode, response: str, fault: str) -> Step:
        if fault:
            os.fork()
        await asyncio.sleep(0.01)
        return await super().step(episode, response)

    def _in_pool(self, text: str) -> str:
        context = multiprocessing.get_context("fork")
        makes: dict[str, Callable[[], Any]] = {
            "pool": lambda: context.Pool(2),
            "left_pool": lambda: context.Pool(2),
            "killed_pool": lambda: context.Pool(2, _outlive),
            "executor": lambda: ProcessPoolExecutor(2, context),
        }
        if self._kind not in makes:
            return text
        with self._lock:
            self._pool = self._pool or makes[self._kind]()
        if self._kind == "executor":
            return self._pool.submit(str, text).result()
        return self._pool.apply(str, (text,))

    def _hang(self, where: str) -> None:
        if self._kind == f"hanging_{where}":
            time.sleep(3600)


def _outlive() -> None:
    """Makes a pool's process an orphan that nobody ends with its parent, for a while."""
    os.setsid()
    threading.Timer(ORPHANS_LIVE_S, os._exit, (0,)).start()


class Faults:
    """Training runs of two steps, each with one fault: all of them in turn."""

    def prepare(self, folder: Path) -> None:
        self._model = write_model(folder / "model")

    def case(self, draw: random.Random, folder: Path) -> bool:
        kind = list(FAULTS)[int(folder.name.rpartition("_")[2]) % len(FAULTS)]
        codes, said = FAULTS[kind]
        options = {"kind": kind, "at": draw.randint(1, 20), "places": draw.choice([1, 2, 8])}
        values = settings(self._model, folder, "Letters")
        values["environment"] = {"name": f"{Path(__file__).resolve()}:Faulty", **options}
        values["rollout"]["faults"] = {
            "max_aborted_share": 0.25,
            "call_s": CALL_S,
            "episode_s": 30.0,
        }
        values["run"]["max_minutes"] = 1.0
        try:
            ended = trained(values, folder, DEADLINE_S)
            if (
                kind == "killed_pool" and ended.code == -signal.SIGKILL
            ):  # by its own hand, so without a word
                values["environment"]["kind"] = ""
                return trained(values, folder, DEADLINE_S, "--overwrite").check(
                    (0,)
                )  # the orphans do not hold the directory
            finished = ended.check(codes)
            if not re.search(said, ended.err):
                raise Wrong(f"did not say {said!r}: {ended.err[-1500:]!r}")
        except Wrong as found:
            raise Wrong(f"{options}: {found}") from None
        return finished

    def close(self) -> dict[str, float]:
        return {}
