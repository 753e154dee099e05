"""One trainer rank: lives in a Ray actor and holds a trainer."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch

from rlflow.cluster.placement import own_node, prepare_process
from rlflow.cluster.session import LOOPBACK
from rlflow.cluster.watching import Doing, Work
from rlflow.cluster.wire import References, pack, receive
from rlflow.devices.gpu_buckets import GpuBucket
from rlflow.devices.matmul import PRODUCTS, Library
from rlflow.report.timer import PeakMemory
from rlflow.trainer.base import LossFunction, Trainer
from rlflow.trainer.options import Routing

SAVING = ("save", "begin_save")


class TrainerRank:
    """One rank. Answers are given by rank 0, None elsewhere.

    gpu: it has one. local, one_connection: see `prepare_process`. products: those of the driver, as
    ranks that measured for themselves might differ."""

    def __init__(
        self,
        threads: int,
        gpu: bool,
        local: bool,
        one_connection: bool,
        products: Mapping[str, Library],
    ) -> None:
        prepare_process(None if gpu else "", local, gpu and one_connection)
        self.gpu, self.local = gpu, local
        self.rank = 0
        self.store: Any = None
        self.trainer: Any = None
        self.stream: Any = iter(())  # of weights
        self.memory = PeakMemory()
        self.work = Work()
        torch.set_num_threads(threads)
        PRODUCTS.fix(products)

    def look(self) -> Doing:
        """What this rank does just now; answered from a thread of its own, whatever the rank is
        in."""
        return self.work.look()

    def run(self, method: str, *arguments: Any) -> Any:
        """Calls a method, of the trainer where this has none of that name, to be looked at while it
        runs."""
        self.work.begin(method)
        try:
            if hasattr(self, method):
                return getattr(self, method)(*arguments)
            saving = self.memory.measure("checkpoint") if method in SAVING else nullcontext()
            with saving:
                return self._from_first(getattr(self.trainer, method)(*arguments))
        finally:
            self.work.end()

    def open_rendezvous(self, world: int) -> tuple[str, int]:
        """Opens the store at which the ranks meet, on a port that the system picks; returns host
        and port."""
        host = LOOPBACK if self.local else own_node()
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        descriptor = listener.detach()
        self.store = torch.distributed.TCPStore(
            host, port, world, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
        )
        return host, port

    def join(self, rank: int, place: tuple[str, int], world: int, timeout_s: float) -> None:
        """Meets the others at a host and port. timeout_s: of their collectives."""
        self.rank = rank
        store = self.store
        if store is None:
            store = torch.distributed.TCPStore(*place, world, is_master=False)
        if self.gpu:
            torch.cuda.set_device(0)  # each rank sees its own device only
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if self.gpu else "gloo",
            store=store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
            device_id=torch.device("cuda", 0) if self.gpu else None,
        )

    def build(self, backend: str, path: str, options: dict[str, Any]) -> Routing | None:
        self.trainer = Trainer.from_pretrained(path, backend, **options)
        return self._from_first(self.trainer.routing)

    def score(
        self, batch: tuple[References, References], model: str, want: tuple[str, ...], top_k: int
    ) -> dict[str, Any] | None:
        with self.memory.measure("score"):
            scores = self.trainer.score(receive(batch), model, want, top_k)
        return self._from_first({name: pack(value) for name, value in scores.items()})

    def update(
        self, batch: tuple[References, References], loss: LossFunction
    ) -> dict[str, float] | None:
        with self.memory.measure("update"):
            return self._from_first(self.trainer.update(receive(batch), loss))

    def peak_memory(self) -> dict[str, float]:
        return self.memory.take()

    def start_weights(self, method: str, *arguments: Any) -> None:
        self.stream = getattr(self.trainer, method)(*arguments)

    def next_weights(self, limit_bytes: int) -> list[tuple[str, Any]] | None:
        """The next tensors, up to `limit_bytes` (one at least), [] at the end. All ranks stop at
        the same tensor."""
        chunk, size = [], 0
        with self.memory.measure("sync"):
            for name, value in self.stream:
                chunk.append((name, pack(value) if self.rank == 0 else None))
                size += value.numel() * value.element_size()
                if size >= limit_bytes:
                    break
        return self._from_first(chunk)

    def next_bucket(self) -> GpuBucket:
        """The next one of `gpu_weights`; from every rank, whose memory it is."""
        with self.memory.measure("sync"):
            return next(self.stream)

    def end_weights(self) -> None:
        """Frees what is left of a stream."""
        self.stream.close()

    def _from_first(self, answer: Any) -> Any:
        return answer if self.rank == 0 else None
