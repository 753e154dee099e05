"""Trainer ranks as Ray actors, on this machine or a cluster.

The driver stays one process: `RayTrainer` is a Trainer whose every method calls the same method on all ranks and
answers what rank 0 answered. Batches and weights travel as numpy arrays: Ray hands those over without a copy, torch
tensors not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rlflow.cluster.rank import TrainerRank
from rlflow.cluster.services import WATCH, Offers
from rlflow.cluster.session import RaySession, connect, first_line
from rlflow.cluster.watching import Doing, StallLimits, Stillness, native_stack, verdict
from rlflow.cluster.wire import pack_batch, unpack
from rlflow.components import file_modules
from rlflow.errors import ConfigError, RLFlowError
from rlflow.matmul import PRODUCTS, Library
from rlflow.report.timer import highest
from rlflow.rollout.calls import RunningTime
from rlflow.trainer.base import LossFunction, Trainer
from rlflow.trainer.layout import ParallelLayout
from rlflow.types import Batch, Loss

logger = logging.getLogger(__name__)

CHUNK_BYTES = 64 * 2**20  # of weights per message; two are in flight
OTHERS_GRACE_S = 10.0  # for the other ranks to finish a call in which one rank failed
PLACEMENT_TIMEOUT_S = 120.0
LOOK_EVERY_S = 5.0  # at what the ranks do, while a call runs
LOOK_TIMEOUT_S = 2.0


class RankDied(RLFlowError):
    """The process of a trainer rank is gone; the trainer is closed."""


class RankStuck(RLFlowError):
    """No trainer rank moves any more; the trainer is closed."""


class RayTrainer(Trainer):
    """A Trainer over `ranks` processes, one Ray actor each, in one torch.distributed world (gloo, or NCCL on GPUs).

    address None starts Ray on this machine, bound to 127.0.0.1, and `close` stops it; else the running cluster at that
    address is joined ("auto": the one of this machine), and paths must be on a file system that all its nodes share.
    gpus_per_rank 0 keeps a rank on the CPU. services: the name of a run to which `rlflow serve trainer` offers processes on that
    cluster; None: actors of its own. stall_timeout_s: a call in which no rank has moved for so long is given up, later where
    calls of its kind took long before (`StallLimits`). Further keywords are those of `Trainer.from_pretrained`.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        ranks: int,
        address: str | None = None,
        threads_per_rank: int = 1,
        gpus_per_rank: float = 0.0,
        services: str | None = None,
        stall_timeout_s: float = 300.0,
        backend: str = "megatron",
        **options: Any,
    ) -> None:
        if ranks < 1:
            raise ConfigError(f"cluster.ranks: a trainer over ranks needs at least 1, found {ranks}.")
        sizes = {field.name: options[field.name] for field in dataclasses.fields(ParallelLayout) if field.name in options}
        ParallelLayout(**sizes).data_parallel(ranks)
        self._actors: list[Any] = []
        self._group: Any = None
        self._phase = ""
        self._deadlines = StallLimits(stall_timeout_s)
        self._homes: list[tuple[str, int]] = []
        self._questions: dict[int, Any] = {}  # by rank: what it does, asked and not answered yet
        self._session: RaySession | None = connect(address, cpus=ranks * threads_per_rank)
        try:
            self._place(ranks, threads_per_rank, gpus_per_rank, address is None, services)
            self._call("build", backend, str(path), options)
            if self._session is not None:
                self._session.watch()  # Ray's agents are there by now
        except BaseException:  # Ctrl-C included: no process may be left behind
            self.close()
            raise

    def score(
        self, batch: Batch, model: str = "policy", want: Sequence[str] = ("logprobs",), top_k: int = 0
    ) -> dict[str, Tensor]:
        scores = self._call("score", self._share(batch), model, tuple(want), top_k)
        return {name: unpack(value) for name, value in scores.items()}

    def update(self, batch: Batch, loss: Loss | LossFunction) -> dict[str, float]:
        import ray

        for module in file_modules():
            ray.cloudpickle.register_pickle_by_value(module)
        return self._call("update", self._share(batch), loss)

    def snapshot(self, name: str) -> None:
        self._call("trainer_method", "snapshot", name)

    def load_frozen(self, name: str, path: str | Path) -> None:
        self._call("trainer_method", "load_frozen", name, str(Path(path).absolute()))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._streamed("weights")

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._streamed("adapter_weights")

    def _streamed(self, method: str) -> Iterator[tuple[str, Tensor]]:
        """From rank 0 in chunks, the next one under way while this one is used; all ranks take part."""
        self._call("start_weights", method)
        pending = self._submit("next_weights", CHUNK_BYTES)
        while chunk := self._gather(pending)[0]:
            pending = self._submit("next_weights", CHUNK_BYTES)
            for name, value in chunk:
                yield name, unpack(value)

    def save(self, path: str | Path, step: int) -> None:
        self._call("save", str(Path(path).absolute()), step)

    def begin_save(self, path: str | Path, step: int) -> None:
        self._call("begin_save", str(Path(path).absolute()), step)

    def finish_save(self, wait: bool = True) -> bool:
        return self._call("trainer_method", "finish_save", wait)

    def load(self, path: str | Path) -> int:
        return self._call("trainer_method", "load", str(Path(path).absolute()))

    def peak_memory(self) -> dict[str, float]:
        return highest(self._gather(self._submit("peak_memory")))

    def close(self) -> None:
        """Ends the ranks, and stops Ray (or leaves the cluster) where this trainer connected. May be called twice."""
        if not (self._actors or self._group or self._session):
            return
        import ray

        actors, group, session = self._actors, self._group, self._session
        self._actors, self._group, self._session = [], None, None
        if ray.is_initialized():  # else the user was faster
            for actor in actors:
                ray.kill(actor)
            if group is not None:
                ray.util.remove_placement_group(group)
        if session is not None:
            session.close()

    def _place(self, ranks: int, threads: int, gpus: float, local: bool, services: str | None) -> None:
        """Finds a process for each rank, and joins them to one process group. Ranks are ordered by node, so that neighbours,
        which tensor parallelism needs to be fast, share one."""
        arguments = (threads, gpus, local, dict(PRODUCTS.chosen()))
        if services is None:
            self._start_actors(ranks, arguments)
        else:
            self._actors = Offers(services, "trainer").claim_all(ranks)
            for actor in self._actors:
                actor.make.remote(TrainerRank, *arguments)
        homes = self._gather(self._submit("home"))
        placed = sorted(zip(homes, self._actors, strict=True), key=lambda pair: pair[0][0])
        self._homes, self._actors = [home for home, _ in placed], [actor for _, actor in placed]
        self._phase = "join"
        self._questions.clear()  # were in the order of before
        host, port = self._gather([self._actors[0].run.remote("open_rendezvous", ranks)])[0]
        self._gather([actor.run.remote("join", rank, ranks, host, port) for rank, actor in enumerate(self._actors)])

    def _start_actors(self, ranks: int, arguments: tuple[int, float, bool, dict[str, Library]]) -> None:
        """One actor per rank, close together."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        threads, gpus, _, _ = arguments
        bundle = {"CPU": threads, **({"GPU": gpus} if gpus else {})}
        self._group = ray.util.placement_group([bundle] * ranks, strategy="PACK")
        if not self._group.wait(timeout_seconds=PLACEMENT_TIMEOUT_S):
            found = {name: amount for name, amount in ray.cluster_resources().items() if name in ("CPU", "GPU")}
            raise ConfigError(
                f"cluster: no room for {ranks} ranks with {bundle} each within {PLACEMENT_TIMEOUT_S:.0f} s; Ray has "
                f"{found} in all; lower cluster.ranks, threads_per_rank or gpus_per_rank, or add nodes"
            )
        options: dict[str, Any] = {"max_restarts": 0, "concurrency_groups": {WATCH: 1}}  # the latter is in no stub of Ray's
        actor_class = ray.remote(num_cpus=threads, num_gpus=gpus, **options)(TrainerRank)
        for index in range(ranks):
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            self._actors.append(actor_class.options(scheduling_strategy=strategy).remote(*arguments))

    def _share(self, batch: Batch) -> Any:
        import ray

        self._check_open()  # before ray.put, which would start Ray again
        return ray.put(pack_batch(batch))

    def _check_open(self) -> None:
        if not self._actors:
            raise RLFlowError("cluster: the trainer is closed; make a new one")

    def _submit(self, method: str, *arguments: Any) -> list[Any]:
        self._check_open()
        self._phase = method if method != "trainer_method" else str(arguments[0])
        return [actor.run.remote(method, *arguments) for actor in self._actors]

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._gather(self._submit(method, *arguments))[0]

    def _gather(self, pending: list[Any]) -> list[Any]:
        """What every rank answered, or the first failure as one RLFlowError.

        When one rank fails, the others may wait for it in a collective for ever. If all of them come back, the ranks
        are still in step (all refused the same argument, say) and the trainer lives on; else it is closed. So it is where
        no rank moves any more: the failure then names the one that the others wait for, and the log has all stacks.
        """
        import ray

        waiting = list(pending)
        failure: RLFlowError | None = None
        deadline: float | None = None
        phase, running = self._phase, RunningTime(LOOK_EVERY_S)
        stillness = Stillness(self._deadlines.of(phase))
        while waiting:
            left = LOOK_EVERY_S if deadline is None else max(0.0, deadline - time.monotonic())
            done, waiting = ray.wait(waiting, num_returns=1, timeout=left)
            running.look()  # often: what a stopped driver sleeps through makes no later call patient
            if not done and deadline is None:
                failure = self._look([pending.index(call) for call in waiting], stillness)
            if not done and (deadline is not None or failure is not None):
                break
            error = _failure_of(done[0], pending.index(done[0])) if done else None
            died = isinstance(error, RankDied) and not isinstance(failure, RankDied)  # the others lost it: not their fault
            if error is not None and (failure is None or died):
                failure = error
                deadline = time.monotonic() + (0.0 if died else OTHERS_GRACE_S)
        if failure is None:
            self._deadlines.took(phase, running.look())
            return ray.get(pending)
        if waiting or isinstance(failure, (RankDied, RankStuck)):
            logger.warning("ranks are lost or out of step: ending all of them")
            self.close()
        raise failure

    def _look(self, ranks: list[int], stillness: Stillness) -> RankStuck | None:
        """Asks the ranks what they do; the failure where none of them has moved for too long. A rank that has not answered
        yet is not asked again: a stopped one would find all the questions when it goes on."""
        import ray

        for rank in ranks:
            if rank not in self._questions:
                self._questions[rank] = self._actors[rank].look.options(concurrency_group=WATCH).remote()
        asked = {rank: self._questions[rank] for rank in ranks}
        answered, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=LOOK_TIMEOUT_S)
        found: dict[int, Doing | None] = {}
        for rank, question in asked.items():
            found[rank] = None
            if question in answered:
                del self._questions[rank]
                with contextlib.suppress(ray.exceptions.RayError):  # it died: its call says so
                    found[rank] = ray.get(question)
        if not stillness.look(found):
            return None
        for rank, doing in found.items():
            stack = "no answer" if doing is None else f"in {doing.phase or 'no call'}\n{doing.stack()}"
            logger.error("trainer rank %d: %s%s", rank, stack, self._seen_from_outside(rank))
        finished = [rank for rank in range(len(self._actors)) if rank not in found]
        told = verdict(self._phase, found, finished, stillness.limit_s)
        hint = "the log has all stacks; the same command with --resume goes on from the last checkpoint"
        return RankStuck(f"cluster: {told}; {hint}")

    def _seen_from_outside(self, rank: int) -> str:
        """py-spy's stack of a rank on this machine, where it is installed."""
        import ray

        if rank >= len(self._homes) or self._homes[rank][0] != ray.util.get_node_ip_address():
            return ""
        found = native_stack(self._homes[rank][1])
        return f"\npy-spy:\n{found}" if found else ""


def _failure_of(reference: Any, rank: int) -> RLFlowError | None:
    """The failure behind a finished call, as one line; the traceback of an unexpected one goes to the log."""
    import ray

    try:
        ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RLFlowError):
            return error.cause
        logger.error("trainer rank %d failed:\n%s", rank, error)
        return RLFlowError(f"trainer rank {rank}: {type(error.cause).__name__}: {first_line(error.cause)}")
    except ray.exceptions.RayActorError as error:
        return RankDied(f"trainer rank {rank} died (killed for memory?): {first_line(error)}")
    except ray.exceptions.RayError as error:
        return RLFlowError(f"trainer rank {rank}: {type(error).__name__}: {first_line(error)}")
    return None
