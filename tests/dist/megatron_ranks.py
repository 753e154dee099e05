"""Four ranks for tests of layouts, and what they do: one launch goes through all jobs of a session."""

from __future__ import annotations

import datetime
import gc
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlflow.batching import ROUTED, ROUTES
from rlflow.models.huggingface import digest
from rlflow.types import Batch, Loss, PolicyOutput

RANKS = 4
UPDATES = 2
OPTIONS: dict[str, Any] = {
    "lr": 1e-3,
    "schedule": {"name": "cosine", "decay_steps": 10},
    "tokens_per_microbatch": 96,
    "optimizer": {"name": "adamw", "eps": 1e-5},
}
"""Rows of up to 32 tokens, so an update of 11 rows takes several micro-batches of different shapes. With Adam's usual eps
an element with nearly no gradient moves by its rounding error divided by its own size, the same in any implementation."""


def make_batch(vocab: int, rows: int = 11, width: int = 32, seed: int = 3) -> Batch:
    """Random rows of different lengths, temperatures, advantages and weights; the first row has the full width."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(width // 3, width + 1, (rows,), generator=draw)
    lengths[0] = width
    positions = torch.arange(width)
    tokens = torch.randint(0, vocab, (rows, width), generator=draw) * (positions < lengths[:, None])
    mask = (
        (positions < lengths[:, None])
        & (positions >= 1)
        & (torch.rand(rows, width, generator=draw) < 0.7)
    )
    weights = mask * torch.rand(rows, width, generator=draw)
    return Batch(
        tokens=tokens,
        loss_mask=mask,
        logprobs=torch.zeros(rows, width),
        advantages=torch.randn(rows, width, generator=draw),
        weights=weights / weights.sum(),
        lengths=lengths,
        temperatures=0.7 + 0.6 * torch.rand(rows, generator=draw),
    )


class PolicyGradientWithEntropy(Loss):
    """-A log p - 0.1 H, so that the gradients of both outputs are exercised; reports the entropy."""

    needs = frozenset({"entropy"})
    reductions = {"highest_entropy": "max", "tokens_seen": "sum"}

    def __call__(self, output: PolicyOutput, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        loss = -batch.advantages * output.logprobs - 0.1 * output.entropy
        entropy = output.entropy
        return loss, {
            "entropy": entropy,
            "highest_entropy": entropy,
            "tokens_seen": torch.ones_like(entropy),
        }


def gathered_logits(trainer: Any, batch: Batch) -> Tensor:
    """(B, T, V) of the policy, put together from all ranks and known to all; 0 at padding. Products never make them."""
    import torch.distributed as dist
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    from rlflow.trainer.megatron import cpu, step

    world = trainer._world

    def collect(
        microbatch: Any, hidden: Tensor, layer: Any
    ) -> tuple[Tensor, Tensor, tuple[list[int], Tensor]]:
        if layer.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=layer.group)
        local = (hidden.flatten(0, 1) @ layer.weight.t()).float()
        parts = [torch.empty_like(local) for _ in range(layer.group.size())]
        dist.all_gather(parts, local, group=layer.group)
        places, logits = microbatch.feed.places, torch.cat(parts, dim=1)[:, : layer.vocab]
        rows = torch.zeros(*places.shape, layer.vocab)
        rows[places >= 0] = logits[places[places >= 0]]
        dist.all_reduce(rows, group=world.context_group)
        return torch.zeros(()), torch.zeros((), dtype=torch.int), (microbatch.rows, rows)

    with torch.no_grad(), cpu.adapted():
        trainer._set_training(False)
        parts = step._run(
            trainer._model, step.plan(batch, trainer._limits, world), collect, forward_only=True
        )
        whole = torch.zeros(*batch.tokens.shape, trainer._architecture.vocab)
        for rows, logits in parts:
            if rows:
                whole[rows, : logits.shape[1]] = logits
        return step._everywhere(whole, world)


def train(
    model: Path,
    batch: Batch,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    save_to: Path | None = None,
    options: dict[str, Any] | None = None,
    load_from: Path | None = None,
) -> dict[str, Any]:
    """Everything that the tests compare, from one trainer: logits, scores, updates, weights, and one update more; then
    one update after loading the checkpoint `load_from` (of another layout)."""
    from rlflow.trainer.base import Trainer

    loss = PolicyGradientWithEntropy()
    sizes = {"tensor_parallel": tensor_parallel, "pipeline_parallel": pipeline_parallel}
    trainer = Trainer.from_pretrained(model, **{**OPTIONS, **sizes, **(options or {})})
    result: dict[str, Any] = {
        "digest": digest(trainer.weights()),
        "logits": gathered_logits(trainer, batch),
        "score": trainer.score(batch, want=("logprobs", "entropy")),
    }
    if trainer.routing is not None and trainer.routing.replay == "recompute":
        result["routes"] = trainer.score(batch, want=("logprobs", ROUTES))[ROUTES]
        other = (result["routes"] + 1) % trainer.routing.experts  # which no router would choose
        batch = batch.replace(extras={ROUTES: other, ROUTED: batch.lengths})
    trainer.snapshot("reference")
    result["metrics"] = [trainer.update(batch, loss) for _ in range(UPDATES)]
    result["weights"] = dict(trainer.weights())
    result["reference"] = trainer.score(batch, model="reference")["logprobs"]
    if save_to is not None:
        trainer.save(save_to, UPDATES)
        result["next_metrics"] = trainer.update(batch, loss)
        result["next_weights"] = dict(trainer.weights())
    if load_from is not None:
        trainer.load(load_from)
        result["loaded_digest"] = digest(trainer.weights())
        result["loaded_metrics"] = trainer.update(batch, loss)
        result["loaded_weights"] = dict(trainer.weights())
    trainer.close()
    return result


def join(rank: int, port: int, ranks: int = RANKS) -> Any:
    """Meets the other ranks at the store of the process that launched them, and returns it."""
    import torch.distributed as dist

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    return store


def run_jobs(rank: int, jobs: list[dict[str, Any]]) -> None:
    """What one rank does: the jobs in order, each by its `train`; rank 0 writes what came out."""
    import torch.distributed as dist

    for job in jobs:
        arguments = {key: value for key, value in job.items() if key not in ("result", "train")}
        result = job.get("train", train)(**arguments)
        same: list[Any] = [None] * RANKS
        dist.all_gather_object(same, (result["metrics"], digest(result["weights"].items())))
        result["same_on_all_ranks"] = all(other == same[0] for other in same)
        if rank == 0:
            torch.save(result, job["result"])
        gc.collect()  # see forget_groups


Work = Callable[[int, list[dict[str, Any]]], None]
"""What each rank does with the jobs, given its number."""


def _serve(rank: int, port: int) -> None:
    """One rank: joins the others, and does what the store names until that is nothing."""
    import torch.distributed as dist

    store = join(rank, port)
    store.set_timeout(datetime.timedelta(days=1))
    for number in itertools.count():
        path = store.get(f"work {number}").decode()
        if not path:
            break
        work, jobs = torch.load(path, weights_only=False)
        work(rank, jobs)
        forget_groups()
        store.add(f"done {number}", 1)
    dist.destroy_process_group()


def forget_groups() -> None:
    """Ends the groups that a work leaves behind, those of trainers that it did not close too. Each has threads that wake up
    a hundred times a second, and Megatron's modules hold theirs in circles."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    RotaryEmbedding.forward.cache_clear()  # remembers its model, and that its groups
    parallel_state.destroy_model_parallel()  # forgets them only
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()


class Ranks:
    """Four ranks, launched when there is work for them, and kept for the work that follows.

    Where a rank raises, dies or takes too long, all are ended; further work gets new ones."""

    def __init__(self) -> None:
        self._context: Any = None
        self._store: Any = None
        self._works = 0

    def run(
        self, directory: Path, jobs: list[dict[str, Any]], limit_s: float, work: Work = run_jobs
    ) -> None:
        """Does the jobs. Raises what a rank raised, with its traceback, or TimeoutError."""
        if self._context is None:
            self._launch()
        number, self._works = self._works, self._works + 1
        # Jobs go through a file: passed as arguments, every tensor would take a file descriptor, of which a fork server passes 256.
        path = directory / f"work-{number}.pt"
        torch.save((work, jobs), path)
        deadline = time.monotonic() + limit_s
        try:
            self._store.set(f"work {number}", str(path))
            while self._store.add(f"done {number}", 0) < RANKS:
                assert not self._context.join(timeout=0.2), "the ranks ended amid their work"
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the ranks took longer than {limit_s:.0f} s")
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        """Ends the ranks."""
        if self._context is not None:
            self._store.set(f"work {self._works}", "")
            self._context.join(timeout=10.0)
            self._end()

    def _launch(self) -> None:
        import multiprocessing

        import torch.distributed as dist
        import torch.multiprocessing as mp

        # One process imports megatron-core and what an optimizer imports (seconds); every rank is forked from it.
        multiprocessing.set_forkserver_preload(["rlflow.trainer.megatron", "torch._dynamo"])
        self._works = 0
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._context = mp.start_processes(
            _serve, (self._store.port,), nprocs=RANKS, join=False, start_method="forkserver"
        )

    def _end(self) -> None:
        for process in self._context.processes:
            if process.is_alive():
                process.kill()
            process.join()
        self._context = self._store = None
