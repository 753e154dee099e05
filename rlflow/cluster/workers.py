"""Rollout workers as Ray actors: placed wherever the cluster has room, also on machines that join while the run goes on."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from rlflow.cluster.pool import WorkerPool
from rlflow.cluster.services import LOOK, REPORT, Offers
from rlflow.cluster.session import LOOPBACK, RaySession, connect, first_line
from rlflow.cluster.slots import Handle, PoolLimits, WorkerGone
from rlflow.components import file_modules
from rlflow.errors import RLFlowError, RolloutError
from rlflow.matmul import PRODUCTS, Library
from rlflow.types import Trajectory

logger = logging.getLogger(__name__)


class RayWorkers:
    """A pool of `count` actors, and Ray where nobody had connected before. make: the class that lives in them, called with (name,
    threads, the driver's choice of matrix products). cpus: that a Ray started here is to have. services: the name of a run
    to which `rlflow serve rollout` offers processes; None: actors of its own. Limits, read: see `WorkerPool`."""

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
        cpus: int,
        services: str | None = None,
    ) -> None:
        self._offers = Offers(services, "rollout") if services else None
        self._session: RaySession | None = connect(address, cpus=cpus)
        self._make = make
        self._threads, self._gpus, self._local = threads, gpus, address is None
        self._products = dict(PRODUCTS.chosen())
        try:
            self.pool = WorkerPool(self._launch, count, read, limits, self._watch)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the workers, and stops Ray (or leaves the cluster) where this connected to it. May be called twice."""
        if hasattr(self, "pool"):
            self.pool.close()
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _launch(self, name: str) -> Handle:
        import ray

        for module in file_modules():  # what the driver loaded of files is known there under no name
            ray.cloudpickle.register_pickle_by_value(module)
        arguments = (self._make, name, self._threads, self._gpus, self._local, self._products)
        if self._offers is not None:
            offered = self._offers.claim(int(name))
            if offered is None:
                raise RolloutError("no service offers a process for it yet (rlflow serve rollout)")
            offered.make.remote(WorkerActor, *arguments)
            return RayWorker(offered)
        groups: dict[str, Any] = {"concurrency_groups": {LOOK: 1, REPORT: 1}}  # in no stub of Ray's
        actor_class = ray.remote(num_cpus=self._threads, num_gpus=self._gpus, max_restarts=0, **groups)(WorkerActor)
        return RayWorker(actor_class.remote(*arguments))

    def _watch(self) -> None:
        if self._session is not None:
            self._session.watch()


class WorkerActor:
    """What Ray runs: makes the worker once it is in its own process, and hands calls on to it."""

    def __init__(
        self,
        make: Callable[[str, int, Mapping[str, Library]], object],
        name: str,
        threads: int,
        gpus: float,
        local: bool,
        products: Mapping[str, Library],
    ) -> None:
        if not gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        if local:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self._worker = make(name, threads, products)

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._worker, method)(*arguments)

    def place(self) -> tuple[str, int]:
        """(address of the machine, number of the process)."""
        import ray

        return ray.util.get_node_ip_address(), os.getpid()


class RayWorker:
    """A worker's actor, as the pool knows it."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._place: Future[tuple[str, int]] = _answer(actor.place.options(concurrency_group=LOOK).remote())

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """The method's result; the future raises an RLFlowError in one line, WorkerGone where the process has died."""
        group = {"concurrency_group": method} if method in (LOOK, REPORT) else {}
        return _answer(self._actor.call.options(**group).remote(method, *arguments))

    def kill(self) -> None:
        """Ends the process, a stopped one too. Of no effect where it has ended."""
        import ray

        if not ray.is_initialized():
            return
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self._actor)
        if self._place.done() and self._place.exception() is None:
            host, pid = self._place.result()
            if host in (LOOPBACK, ray.util.get_node_ip_address()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)  # Ray asks first, and a stopped process does not hear


def _answer(reference: Any) -> Future[Any]:
    """The call's result, or what was wrong with it, in one line; the traceback of the unexpected goes to the log."""
    import ray

    answered: Future[Any] = Future()

    def hand_over(found: Future[Any]) -> None:
        error = found.exception()
        if error is None:
            answered.set_result(found.result())
        elif isinstance(error, ray.exceptions.RayTaskError):
            cause = error.cause
            if not isinstance(cause, RLFlowError):
                logger.error("a rollout worker failed:\n%s", error)
                cause = RolloutError(f"{type(cause).__name__}: {first_line(cause)}")
            answered.set_exception(cause)
        else:
            answered.set_exception(WorkerGone(f"its process died (killed for memory?): {first_line(error)}"))

    reference.future().add_done_callback(hand_over)
    return answered
