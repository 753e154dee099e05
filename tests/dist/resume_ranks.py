"""What each rank of the resume tests does: trains, saves, goes on; or loads and goes on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from rlflow.errors import RLFlowError
from tests.dist.megatron_ranks import OPTIONS, RANKS, PolicyGradientWithEntropy, make_batch

BEFORE, AFTER = 2, 2
"""Updates before and after the checkpoint."""


def run(job: dict[str, Any]) -> dict[str, Any]:
    """{metrics, weights, reference} after the updates that follow the checkpoint, or {error} where loading it fails.

    A job without `load` trains and saves in the background first, and ends that save only after one update more."""
    from rlflow.trainer.base import Trainer

    loss = PolicyGradientWithEntropy()
    trainer = Trainer.from_pretrained(job["model"], **{**OPTIONS, **job["options"]})
    batches = [make_batch(job["vocab"], seed=seed) for seed in range(BEFORE + AFTER)]
    try:
        if job.get("load"):
            assert trainer.load(job["load"]) == BEFORE
        else:
            trainer.snapshot("reference")
            for batch in batches[:BEFORE]:
                trainer.update(batch, loss)
            trainer.begin_save(job["save"], BEFORE)
        metrics = [trainer.update(batch, loss) for batch in batches[BEFORE:]]
        assert trainer.finish_save()
        reference = trainer.score(batches[0], "reference")["logprobs"]
        return {"metrics": metrics, "weights": dict(trainer.weights()), "reference": reference}
    except RLFlowError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        trainer.close()


def rank_main(rank: int, rendezvous: str, jobs: list[dict[str, Any]]) -> None:
    """One rank of four; every rank writes what came out, as rank 0's file name with its number."""
    import torch.distributed as dist

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    for job in jobs:
        if job.get("damage") and rank == 0:
            damage(Path(job["load"]))
        dist.barrier()
        torch.save(run(job), f"{job['result']}.{rank}")
    dist.destroy_process_group()


def damage(checkpoint: Path) -> None:
    """Flips one bit in the middle of one rank's file."""
    file = sorted(checkpoint.glob("*.distcp"))[-1]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
