"""Rollout workers as Ray actors: on the ranks' GPUs, or wherever the cluster has room, also on
machines that join while the run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rlflow.cluster.actors import end_actor, start_actor, why_failed
from rlflow.cluster.object_store import check_room, room_for
from rlflow.cluster.placement import Placement, prepare_process
from rlflow.cluster.pool import WorkerPool
from rlflow.cluster.session import RaySession, connect
from rlflow.cluster.slots import Handle, PoolLimits
from rlflow.devices.matmul import PRODUCTS, Library
from rlflow.errors import RolloutError
from rlflow.types import Trajectory

LOOK, REPORT = "look", "report"
"""Ray's concurrency groups: threads beside the one that works."""


class RayWorkers:
    """A pool of `count` actors, and Ray where nobody had connected before.

    make: the class that lives in them, called with (name, threads, the driver's choice of matrix
    products). gpus: of a worker, whole ones; with a placement, on whose GPUs workers are beside the
    ranks, and all up first: the share of each. each: GPUs of a worker. cpus: that a Ray started
    here is to have. store_bytes: that its object store should hold. Limits, read: see
    `WorkerPool`."""

    def __init__(
        self,
        make: Callable[[str, int, Mapping[str, Library]], object],
        count: int,
        *,
        read: Callable[[Any], Trajectory],
        limits: PoolLimits,
        address: str | None,
        threads: int,
        gpus: float,
        each: int,
        cpus: int,
        store_bytes: int = 0,
        placement: Placement | None = None,
    ) -> None:
        self._session: RaySession | None = connect(address, cpus, room_for(store_bytes))
        products = dict(PRODUCTS.chosen())

        def launch(name: str) -> Handle:
            seen = None if gpus else ""
            options: dict[str, Any] = {"num_cpus": threads, "num_gpus": each if gpus else 0}
            if placement is not None:
                first = int(name) * each
                seen = ",".join(bundle.gpu for bundle in placement.bundles[first : first + each])
                options = placement.options(first, threads, gpus)
            arguments = (seen, address is None, make, name, threads, products)
            return RayWorker(start_actor(WorkerActor, options, [LOOK, REPORT], *arguments))

        try:
            check_room(store_bytes)
            self.pool = WorkerPool(launch, count, read, limits)
            if placement is not None:
                await_all(self.pool)  # vLLM measures its GPU while it starts: ranks take none yet
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the workers, and stops Ray (or leaves the cluster) where this connected to it. May
        be called twice."""
        if hasattr(self, "pool"):
            self.pool.close()
        session, self._session = self._session, None
        if session is not None:
            session.close()


def await_all(pool: WorkerPool) -> None:
    """Returns once all workers are up. Raises RLFlowError where one is not within the limits of a
    start."""
    limit_s = pool.limits.place_s + pool.limits.start_s
    until = time.monotonic() + limit_s
    while down := pool.down:
        pool.check()
        if time.monotonic() > until:
            raise RolloutError(
                "cluster.rollout_workers: those beside ranks must all be up before the trainer "
                f"takes memory, not up after {limit_s:g} s: {', '.join(down)}; the log says why."
            )
        time.sleep(0.02)


class WorkerActor:
    """What Ray runs: makes the worker once it is in its own process, and hands calls on to it.

    gpus, local: see `prepare_process`. arguments: what `make` is called with."""

    def __init__(
        self, gpus: str | None, local: bool, make: Callable[..., object], *arguments: Any
    ) -> None:
        prepare_process(gpus, local)
        self._worker = make(*arguments)

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._worker, method)(*arguments)


@dataclass(frozen=True)
class RayWorker:
    """A worker's actor, as the pool knows it."""

    actor: Any

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """The method's result; the future raises an RLFlowError in one line, ActorDied where the
        process has."""
        group = {"concurrency_group": method} if method in (LOOK, REPORT) else {}
        answered: Future[Any] = Future()
        answered.set_running_or_notify_cancel()  # who waits may give up; the answer still comes

        def hand_over(found: Future[Any]) -> None:
            if (error := found.exception()) is None:
                answered.set_result(found.result())
            else:
                answered.set_exception(why_failed(error, "its process"))

        asked = self.actor.call.options(**group).remote(method, *arguments)
        asked.future().add_done_callback(hand_over)
        return answered

    def kill(self) -> None:
        """See `end_actor`."""
        end_actor(self.actor)
