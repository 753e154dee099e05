"""One trainer rank: lives in a Ray actor and holds a trainer."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlflow.cluster.session import LOOPBACK
from rlflow.cluster.watching import Doing, Work
from rlflow.cluster.wire import pack, unpack_batch
from rlflow.matmul import PRODUCTS, Library
from rlflow.report.timer import PeakMemory
from rlflow.trainer.base import LossFunction, Trainer


class TrainerRank:
    """One rank: lives in a Ray actor and holds a trainer. Answers are given by rank 0, None elsewhere."""

    def __init__(self, threads: int, gpus: float, local: bool, products: dict[str, Library]) -> None:
        self.local = local
        self.gpus = gpus
        self.rank = 0
        self.store: Any = None
        self.trainer: Any = None
        self.stream: Iterator[tuple[str, Tensor]] = iter(())
        self.memory = PeakMemory()
        self.work = Work()
        torch.set_num_threads(threads)
        PRODUCTS.fix(products)  # those of the driver: ranks that measured for themselves might differ
        if not gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        if local:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"

    def look(self) -> Doing:
        """What this rank does just now; answered from a thread of its own, whatever the rank is in."""
        return self.work.look()

    def run(self, method: str, *arguments: Any) -> Any:
        """Calls a method, to be looked at while it runs."""
        self.work.begin(method if method != "trainer_method" else str(arguments[0]))
        try:
            return getattr(self, method)(*arguments)
        finally:
            self.work.end()

    def node(self) -> str:
        import ray

        return ray.util.get_node_ip_address()

    def home(self) -> tuple[str, int]:
        """(node, process)."""
        return self.node(), os.getpid()

    def open_rendezvous(self, world: int) -> tuple[str, int]:
        """Opens the store at which the ranks meet, on a port that the system picks; returns its host and port."""
        host = LOOPBACK if self.local else self.node()
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        self.store = torch.distributed.TCPStore(
            host, port, world, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return host, port

    def join(self, rank: int, world: int, host: str, port: int) -> None:
        self.rank = rank
        store = self.store or torch.distributed.TCPStore(host, port, world, is_master=False)
        if self.gpus:
            torch.cuda.set_device(0)  # Ray shows each actor its own device only
        kind = "cpu:gloo,cuda:nccl" if self.gpus else "gloo"
        torch.distributed.init_process_group(kind, store=store, rank=rank, world_size=world)

    def build(self, backend: str, path: str, options: dict[str, Any]) -> None:
        self.trainer = Trainer.from_pretrained(path, backend, **options)

    def score(self, batch: dict[str, Any], model: str, want: tuple[str, ...], top_k: int) -> dict[str, Any] | None:
        with self.memory.measure("score"):
            scores = self.trainer.score(unpack_batch(batch), model, want, top_k)
        return self._from_first({name: pack(value) for name, value in scores.items()})

    def update(self, batch: dict[str, Any], loss: LossFunction) -> dict[str, float] | None:
        with self.memory.measure("update"):
            return self._from_first(self.trainer.update(unpack_batch(batch), loss))

    def save(self, path: str, step: int) -> None:
        with self.memory.measure("checkpoint"):
            self.trainer.save(path, step)

    def begin_save(self, path: str, step: int) -> None:
        with self.memory.measure("checkpoint"):
            self.trainer.begin_save(path, step)

    def peak_memory(self) -> dict[str, float]:
        return self.memory.take()

    def trainer_method(self, method: str, *arguments: Any) -> Any:
        return self._from_first(getattr(self.trainer, method)(*arguments))

    def start_weights(self, method: str) -> None:
        self.stream = getattr(self.trainer, method)()

    def next_weights(self, limit_bytes: int) -> list[tuple[str, Any]] | None:
        """The next tensors, up to `limit_bytes` (one at least), [] at the end. All ranks stop at the same tensor."""
        chunk, size = [], 0
        with self.memory.measure("sync"):
            for name, value in self.stream:
                chunk.append((name, pack(value) if self.rank == 0 else None))
                size += value.numel() * value.element_size()
                if size >= limit_bytes:
                    break
        return self._from_first(chunk)

    def _from_first(self, answer: Any) -> Any:
        return answer if self.rank == 0 else None
