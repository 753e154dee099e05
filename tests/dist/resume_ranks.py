"""What each rank of the resume tests does: trains, saves, goes on; or loads and goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from rlflow.errors import RLFlowError
from tests.dist.megatron_ranks import OPTIONS, PolicyGradientWithEntropy, make_batch

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


def run_jobs(rank: int, jobs: list[dict[str, Any]]) -> None:
    """One rank of four; every rank writes what came out, as rank 0's file name with its number."""
    import torch.distributed as dist

    for job in jobs:
        if job.get("damage") and rank == 0:
            damage(Path(job["load"]))
        dist.barrier()
        torch.save(run(job), f"{job['result']}.{rank}")


def run_elsewhere(
    megatron: str, directory: Path, jobs: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """What rank 0 of four found in each job, with the megatron-core of another folder (RLFLOW_MEGATRON_PATHS)."""
    torch.save(jobs, directory / "elsewhere.pt")
    root = Path(__file__).resolve().parents[2]
    places = os.pathsep.join([megatron, str(root), str(root / "tests")])
    code = f"""
from pathlib import Path
import torch
from tests.dist import megatron_ranks, resume_ranks
if __name__ == "__main__":
    directory = Path({str(directory)!r})
    jobs = torch.load(directory / "elsewhere.pt", weights_only=False)
    ranks = megatron_ranks.Ranks()
    ranks.run(directory, jobs, limit_s=280, work=resume_ranks.run_jobs)
    ranks.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": places},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [torch.load(f"{job['result']}.0", weights_only=False) for job in jobs]


def damage(checkpoint: Path) -> None:
    """Flips one bit in the middle of one rank's file."""
    file = sorted(checkpoint.glob("*.distcp"))[-1]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
