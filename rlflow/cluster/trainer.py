"""Trainer ranks as Ray actors, on this machine or a cluster.

The driver stays one process: `RayTrainer` is a Trainer whose every method calls the same method on
all ranks and answers what rank 0 answered."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlflow.cluster.actors import (
    ActorDied,
    end_actor,
    send_file_modules,
    start_actor,
    why_failed,
)
from rlflow.cluster.placement import Placement
from rlflow.cluster.rank import TrainerRank
from rlflow.cluster.watching import Doing, Stillness, verdict
from rlflow.cluster.wire import Parcels, References, unpack
from rlflow.devices.gpu_buckets import GpuBucket, GpuSharing, joined
from rlflow.devices.matmul import PRODUCTS
from rlflow.errors import ConfigError, RLFlowError
from rlflow.net.calls import RunningTime
from rlflow.report.timer import highest
from rlflow.trainer.base import LossFunction, Trainer
from rlflow.trainer.layout import ParallelLayout
from rlflow.types import Batch, Loss

logger = logging.getLogger(__name__)

CHUNK_BYTES = 64 * 2**20  # of weights per message; two are in flight
OTHERS_GRACE_S = 10.0  # for the other ranks to finish a call in which one rank failed
START_S = 120.0  # at least, for the processes to start and import: a machine may be busy
LOOK_EVERY_S = 5.0  # at what the ranks do, while a call runs
LOOK_TIMEOUT_S = 2.0
SAVE_POLL_S = 0.1
COLLECTIVE_LIMITS = 2
"""A collective may wait for so many times as long as ranks may stand still: it ends ranks whose
driver does not look at them any more."""
WATCH = "watch"
"""Ray's concurrency group of the thread that looks at the one which works."""


class RankStuck(RLFlowError):
    """No trainer rank moves any more; the trainer is closed."""


class RayTrainer(Trainer):
    """A Trainer over `ranks` processes, one Ray actor each, in one torch.distributed world (gloo,
    or NCCL on GPUs, of which each rank has one).

    address None starts Ray on this machine, bound to 127.0.0.1, and `close` stops it; else the
    running cluster at that address is joined ("auto": the one of this machine), and paths must be
    on a file system that all its nodes share. gpus_per_rank: the share of a GPU, whose rest is for
    a rollout worker; 0 keeps a rank on the CPU. stall_timeout_s: a call in which no rank has moved
    for so long is given up. placement: of a run that has one, at whose places 0 to `ranks` - 1 the
    ranks are; None: a new one. Further keywords are those of `Trainer.from_pretrained`."""

    def __init__(
        self,
        path: str | Path,
        *,
        ranks: int,
        address: str | None = None,
        threads_per_rank: int = 1,
        gpus_per_rank: float = 0.0,
        stall_timeout_s: float = 600.0,
        placement: Placement | None = None,
        backend: str = "megatron",
        **options: Any,
    ) -> None:
        if ranks < 1:
            raise ConfigError(
                f"cluster.ranks: a trainer over ranks needs at least 1, found {ranks}."
            )
        names = {field.name for field in dataclasses.fields(ParallelLayout)}
        layout = ParallelLayout(**{name: options[name] for name in names & options.keys()})
        layout.data_parallel(ranks)
        self._actors: list[Any] = []
        self._phase = ""
        self._stall_timeout_s = stall_timeout_s
        self._questions: dict[int, Any] = {}  # by rank: what it does, asked and not answered yet
        self._parcels = Parcels()
        gpus = gpus_per_rank > 0
        places = placement or Placement(address, ranks, cpus=threads_per_rank, gpus=gpus)
        self._placement = None if placement else places
        try:
            connected = layout.tensor_parallel > 1 or layout.context_parallel > 1
            held = start_ranks(places, ranks, threads_per_rank, gpus_per_rank, connected)
            self._actors = held
            self._meet(ranks)
            self.routing = self._call("build", backend, str(path), options)
        except BaseException:  # Ctrl-C included: no process may be left behind
            self.close()
            raise

    def score(
        self,
        batch: Batch,
        model: str = "policy",
        want: Sequence[str] = ("logprobs",),
        top_k: int = 0,
    ) -> dict[str, Tensor]:
        scores = self._call("score", self._share(batch), model, tuple(want), top_k)
        return {name: unpack(value) for name, value in scores.items()}

    def update(self, batch: Batch, loss: Loss | LossFunction) -> dict[str, float]:
        send_file_modules()
        return self._call("update", self._share(batch), loss)

    def snapshot(self, name: str) -> None:
        self._call("snapshot", name)

    def load_frozen(self, name: str, path: str | Path) -> None:
        self._call("load_frozen", name, str(Path(path).absolute()))

    def weights(
        self, device: str | None = "cpu", merged: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """As `Trainer.weights`. The ranks begin at once: memory that they free for it is free when
        this returns. Of them rank 0 alone copies to its host. device None: tensors in Ray's
        memory."""
        self._call("start_weights", "weights", None, merged)
        tensors = self._streamed(copy=device is not None)
        if device in (None, "cpu"):
            return tensors
        return ((name, value.to(device)) for name, value in tensors)

    def gpu_weights(
        self, how: GpuSharing, merged: torch.dtype | None = None
    ) -> Iterator[GpuBucket]:
        """See `Trainer.gpu_weights`. Each rank packs on its own GPU, whatever `how.gpus` says; a
        bucket has the handles of all. The ranks begin at once, as for `weights`."""
        self._call("start_weights", "gpu_weights", GpuSharing(how.bucket_bytes), merged)
        return self._buckets()

    def adapters_arrived(self) -> float | None:
        return self._call("adapters_arrived")

    def _buckets(self) -> Iterator[GpuBucket]:
        bucket: GpuBucket | None = None
        try:
            while bucket is None or bucket.tensors:
                bucket = joined(self._gather(self._submit("next_bucket")))
                yield bucket
        finally:
            if self._actors:
                self._call("end_weights")

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        self._call("start_weights", "adapter_weights")
        return self._streamed(copy=True)

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        self._call("start_weights", "adapters")
        return self._streamed(copy=True)

    def _streamed(self, copy: bool) -> Iterator[tuple[str, Tensor]]:
        """From rank 0 in chunks, the next one under way while this one is used; all ranks take
        part."""
        pending = self._submit("next_weights", CHUNK_BYTES)
        while chunk := self._gather(pending)[0]:
            pending = self._submit("next_weights", CHUNK_BYTES)
            for name, value in chunk:
                yield name, unpack(value, copy)

    def save(self, path: str | Path, step: int) -> None:
        self._call("save", str(Path(path).absolute()), step)

    def begin_save(self, path: str | Path, step: int) -> None:
        self._call("begin_save", str(Path(path).absolute()), step)

    def finish_save(self, wait: bool = True) -> bool:
        """See `Trainer.finish_save`. Ranks are asked until they have written: a call that waits for
        a slow disk would be taken for one that hangs."""
        told_at = time.monotonic()
        while not (done := self._call("finish_save", False)) and wait:
            if time.monotonic() - told_at > self._stall_timeout_s:
                logger.warning("the checkpoint is still being written")
                told_at = time.monotonic()
            time.sleep(SAVE_POLL_S)
        return done

    def load(self, path: str | Path) -> int:
        return self._call("load", str(Path(path).absolute()))

    def peak_memory(self) -> dict[str, float]:
        return highest(self._gather(self._submit("peak_memory")))

    def close(self) -> None:
        """Ends the ranks, and stops Ray (or leaves the cluster) where this trainer connected. May
        be called twice."""
        actors, placement = self._actors, self._placement
        self._actors, self._placement = [], None
        for actor in actors:
            end_actor(actor)
        if placement is not None:
            placement.close()

    def _meet(self, ranks: int) -> None:
        """Joins the ranks to one process group."""
        self._phase, limit_s = "join", COLLECTIVE_LIMITS * self._stall_timeout_s
        opened = self._actors[0].run.remote("open_rendezvous", ranks)
        place = self._gather([opened], max(START_S, self._stall_timeout_s))[0]
        joining = [
            actor.run.remote("join", rank, place, ranks, limit_s)
            for rank, actor in enumerate(self._actors)
        ]
        self._gather(joining)

    def _share(self, batch: Batch) -> tuple[References, References]:
        self._check_open()  # before ray.put, which would start Ray again
        return self._parcels.send(batch)

    def _check_open(self) -> None:
        if not self._actors:
            raise RLFlowError("cluster: the trainer is closed; make a new one")

    def _submit(self, method: str, *arguments: Any) -> list[Any]:
        self._phase = method
        return [actor.run.remote(method, *arguments) for actor in self._actors]

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._gather(self._submit(method, *arguments))[0]

    def _gather(self, pending: list[Any], stall_timeout_s: float | None = None) -> list[Any]:
        """What every rank answered, or the first failure as one RLFlowError.

        When one rank fails, the others may wait for it in a collective for ever. If all of them
        come back, the ranks are still in step (all refused the same argument, say) and the trainer
        lives on; else it is closed. So it is where no rank moves any more: the failure then names
        the one that the others wait for, and the log has all stacks."""
        self._check_open()  # before ray.wait, which would start Ray again
        import ray

        waiting = list(pending)
        failure: RLFlowError | None = None
        deadline: float | None = None
        limit_s = stall_timeout_s or self._stall_timeout_s
        stillness = Stillness(limit_s, RunningTime(LOOK_EVERY_S + LOOK_TIMEOUT_S))
        while waiting:
            left = LOOK_EVERY_S if deadline is None else max(0.0, deadline - time.monotonic())
            done, waiting = ray.wait(waiting, num_returns=1, timeout=left)
            if not done:
                if deadline is None:
                    failure = self._look([pending.index(call) for call in waiting], stillness)
                if failure is not None:
                    break
                continue
            error = _failure_of(done[0], pending.index(done[0]))
            # The others lost it then: not their fault
            died = isinstance(error, ActorDied) and not isinstance(failure, ActorDied)
            if error is not None and (failure is None or died):
                failure = error
                deadline = time.monotonic() + (0.0 if died else OTHERS_GRACE_S)
        if failure is None:
            return ray.get(pending)
        if waiting or isinstance(failure, (ActorDied, RankStuck)):
            logger.warning("ranks are lost or out of step: ending all of them")
            self.close()
        raise failure

    def _look(self, ranks: list[int], stillness: Stillness) -> RankStuck | None:
        """Asks the ranks what they do; the failure where none of them has moved for too long. A
        rank that has not answered yet is not asked again: a stopped one would find all the
        questions when it goes on."""
        import ray

        for rank in ranks:
            if rank not in self._questions:
                look = self._actors[rank].look.options(concurrency_group=WATCH)
                self._questions[rank] = look.remote()
        asked = [self._questions[rank] for rank in ranks]
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=LOOK_TIMEOUT_S)
        found: dict[int, Doing | None] = dict.fromkeys(ranks)
        for rank, question in zip(ranks, asked, strict=True):
            if question in answered:
                del self._questions[rank]
                with contextlib.suppress(ray.exceptions.RayError):  # it died: its call says so
                    found[rank] = ray.get(question)
        if not stillness.look(found):
            return None
        for rank, doing in found.items():
            told = (
                "no answer" if doing is None else f"in {doing.phase or 'no call'}\n{doing.stack()}"
            )
            logger.error("trainer rank %d: %s", rank, told)
        finished = [rank for rank in range(len(self._actors)) if rank not in found]
        return RankStuck(
            f"cluster: {verdict(self._phase, found, finished, stillness.limit_s)}; the log has all "
            "stacks (`ray stack` on its machine tells more); the same command with --resume goes "
            "on from the last checkpoint"
        )


def start_ranks(
    placement: Placement, ranks: int, threads: int, gpus: float, one_connection: bool
) -> list[Any]:
    """An actor for each rank, in the order of the places. gpus: the share of its place's GPU."""
    arguments = (threads, gpus > 0, placement.local, one_connection, dict(PRODUCTS.chosen()))
    places = [placement.options(rank, threads, gpus) for rank in range(ranks)]
    return [start_actor(TrainerRank, place, [WATCH], *arguments) for place in places]


def _failure_of(reference: Any, rank: int) -> RLFlowError | None:
    """The failure behind a finished call."""
    import ray

    try:
        ray.get(reference)
    except ray.exceptions.RayError as error:
        return why_failed(error, f"trainer rank {rank}")
    return None
