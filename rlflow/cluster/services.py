"""Processes that a service offers to a run: empty Ray actors with a name, in which the run's driver makes ranks and workers.

A service is a command of its own on any machine of the cluster (`rlflow serve`); it starts its processes again when they end, and
knows nothing of the run but its name. The driver finds them by that name, claims them and fills them. What an earlier driver has
left in a process is of no use to the next one, who ends it; the service then offers a fresh one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

from rlflow.cluster.session import connect, first_line
from rlflow.errors import ConfigError, RLFlowError

logger = logging.getLogger(__name__)

Role = Literal["trainer", "rollout"]
LOOK, REPORT, WATCH = "look", "report", "watch"
"""Ray's concurrency groups: threads beside the one that works."""
CLAIM_TIMEOUT_S = 5.0
MAKE_TIMEOUT_S = 60.0
OFFER_TIMEOUT_S = 120.0
LOST_S = 60.0  # a cluster that has not answered for so long is gone
EVERY_S = 0.5


class OfferedProcess:
    """What Ray runs for a service: nothing, until a driver makes something in it; then it hands calls on to that."""

    def __init__(self) -> None:
        self._owner = ""
        self._inner: Any = None
        self._made = threading.Event()

    def claim(self, driver: str) -> bool:
        """Whether the driver has the process for itself now: nobody had it before."""
        first, self._owner = not self._owner, self._owner or driver
        return first

    def make(self, kind: Callable[..., Any], *arguments: Any) -> None:
        self._inner = kind(*arguments)
        self._made.set()

    def run(self, method: str, *arguments: Any) -> Any:
        return self._there.run(method, *arguments)

    def call(self, method: str, *arguments: Any) -> Any:
        return self._there.call(method, *arguments)

    def look(self) -> Any:
        return self._there.look()

    def place(self) -> tuple[str, int]:
        """(address of the machine, number of the process)."""
        import ray

        return ray.util.get_node_ip_address(), os.getpid()

    @property
    def _there(self) -> Any:
        """What was made here, waited for: calls in threads of their own may come before that."""
        if not self._made.wait(MAKE_TIMEOUT_S):
            raise RLFlowError(f"serve: nothing was made in this process within {MAKE_TIMEOUT_S:.0f} s")
        return self._inner


def namespace(run: str) -> str:
    """Where the processes for a run have their names."""
    return f"rlflow/{run}"


def serve(
    role: Role,
    run: str,
    address: str,
    *,
    count: int = 1,
    first: int = 0,
    threads: int = 1,
    gpus: float = 0.0,
    say: Callable[[str], object] = print,
) -> None:
    """Offers `count` processes to the run of that name, numbered from `first` on, until it is interrupted.

    Raises ConfigError where no cluster answers, RLFlowError where it is gone."""
    import ray

    session = connect(address, cpus=count * threads)
    groups: dict[str, Any] = {"concurrency_groups": {LOOK: 1, REPORT: 1, WATCH: 1}}  # in no stub of Ray's
    kind = ray.remote(num_cpus=threads, num_gpus=gpus, max_restarts=0, **groups)(OfferedProcess)
    service = _Service(role, run, kind, range(first, first + count), say)
    answered_at = time.monotonic()
    try:
        while True:
            if service.look():
                answered_at = time.monotonic()
            elif time.monotonic() - answered_at > LOST_S:
                raise RLFlowError(f"serve: the cluster at {address} has not answered for {LOST_S:.0f} s; is it gone?")
            time.sleep(EVERY_S)
    finally:
        service.end()
        if session is not None:
            session.close()


class _Service:
    """Processes that are kept on offer. kind: the class of the actors."""

    def __init__(self, role: Role, run: str, kind: Any, numbers: range, say: Callable[[str], object]) -> None:
        self._role, self._run, self._kind, self._numbers, self._say = role, run, kind, numbers, say
        self._actors: dict[int, Any] = {}
        self._questions: dict[int, Any] = {}  # asked and not answered yet
        self._up: set[int] = set()

    def look(self) -> bool:
        """Starts what is not there and asks each process whether it lives; whether any of them has answered."""
        import ray

        for number in self._numbers:
            if number not in self._actors:
                options = {"name": f"{self._role}-{number}", "namespace": namespace(self._run)}
                with contextlib.suppress(ValueError):  # the name is still that of the one that has ended
                    self._actors[number] = self._kind.options(**options).remote()
            if number in self._actors and number not in self._questions:
                self._questions[number] = self._actors[number].place.options(concurrency_group=LOOK).remote()
        questions = list(self._questions.values())
        done = ray.wait(questions, num_returns=len(questions), timeout=EVERY_S)[0] if questions else []
        for number in [number for number, question in self._questions.items() if question in done]:
            self._hear(number, self._questions.pop(number))
        return bool(done)

    def _hear(self, number: int, question: Any) -> None:
        import ray

        try:
            where, pid = ray.get(question)
        except ray.exceptions.RayActorError as error:
            del self._actors[number]
            self._up.discard(number)
            self._say(f"{self._role} {number}: its process has ended ({first_line(error)}); another one is started")
            return
        if number not in self._up:
            self._up.add(number)
            self._say(f"{self._role} {number}: process {pid} on {where} is offered to the run '{self._run}'")

    def end(self) -> None:
        import ray

        for actor in self._actors.values():
            with contextlib.suppress(ray.exceptions.RayError):  # the cluster may be gone
                ray.kill(actor)


class Offers:
    """The processes of one role that services offer to a run, for its driver."""

    def __init__(self, run: str, role: Role) -> None:
        self._run, self._role = run, role
        self._driver = f"{os.uname().nodename}/{os.getpid()}/{time.time()}"

    def claim(self, number: int) -> Any | None:
        """The process of that number, if there is one that nobody has used; one that somebody has is ended."""
        import ray

        try:
            actor = ray.get_actor(f"{self._role}-{number}", namespace=namespace(self._run))
            if ray.get(actor.claim.remote(self._driver), timeout=CLAIM_TIMEOUT_S):
                return actor
        except ValueError:  # no actor of that name
            return None
        except ray.exceptions.RayError:  # it is ending, or stopped
            return None
        ray.kill(actor)
        return None

    def claim_all(self, count: int) -> list[Any]:
        """Processes 0 to count - 1, waited for. Raises ConfigError where they are not offered in time."""
        found: dict[int, Any] = {}
        until = time.monotonic() + OFFER_TIMEOUT_S
        while len(found) < count:
            for number in range(count):
                if number not in found and (actor := self.claim(number)) is not None:
                    found[number] = actor
            if len(found) < count and time.monotonic() > until:
                missing = ", ".join(str(number) for number in range(count) if number not in found)
                raise ConfigError(
                    f"cluster.services: no service offered {self._role} {missing} of '{self._run}' within {OFFER_TIMEOUT_S:.0f} "
                    f"s; start one with `rlflow serve {self._role} --run {self._run} --cluster ADDRESS --processes {count}`."
                )
            time.sleep(EVERY_S if len(found) < count else 0.0)
        return [found[number] for number in range(count)]
