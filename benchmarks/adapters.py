#!/usr/bin/env python
"""What a sync of adapters costs, and how near the engine's policy is to the trainer's afterwards:
adapters alone against adapters merged into weights.

    python benchmarks/adapters.py MODEL [--quick] [--dtype bfloat16] [--rank 64] [--lr 1e-5]

Before and after 1, 20 and 100 updates both ways give an embedded engine the policy, which samples
the same prompts from it. Of each: bytes and seconds of the sync (the best of three, verification
included); the mean and largest difference of engine and trainer in log-probs, nats per token; and
of what the adapters change in log-probs the share that the engine's have, with its standard error
(`rlflow.run.arrival.effect`). Updates go along random advantages: nothing is learned, and weights
move as in training. The last line is one JSON object. --quick: three updates of a few rows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from common import versions

from rlflow.algorithms import PPOClipLoss, token_weights
from rlflow.batching import make_batch
from rlflow.devices.matmul import processor_name
from rlflow.environment import Environment
from rlflow.rollout import Rollout
from rlflow.run.arrival import effect
from rlflow.trainer.base import BASE, Trainer
from rlflow.types import Batch, Step, Task

PROMPTS = ("The river", "Once upon a time", "To make bread, first", "The capital of France", "In 1969",
           "She opened the door and", "Water boils", "A good teacher")  # fmt: skip
UPDATES, QUICK_UPDATES = (0, 1, 20, 100), (0, 1, 3)
SYNCS = 3


class Continuations(Environment):
    """One response to each prompt, whatever it is."""

    def tasks(self, split: str) -> list[Task]:
        return [Task(f"{split}-{number}", prompt) for number, prompt in enumerate(PROMPTS)]

    def step(self, episode: Any, response: str) -> Step:
        return Step(reward=0.0, terminated=True)


def sampled(rollout: Rollout, samples: int, step: int) -> Batch:
    groups = rollout.collect(rollout.environment.tasks("train"), step, samples)
    return make_batch([one for group in groups for one in group.usable])


def measured(
    rollout: Rollout, trainer: Trainer, way: str, version: int, samples: int
) -> dict[str, float]:
    """A line of the table."""
    taken_s = []
    for _ in range(SYNCS):
        began = time.perf_counter()
        rollout.load_weights(trainer.adapters() if way == "alone" else trainer.weights(), version)
        taken_s.append(time.perf_counter() - began)
    batch = sampled(rollout, samples, step=1000 + version)
    mask = batch.loss_mask
    policy, base = (trainer.score(batch, one)["logprobs"][mask] for one in ("policy", BASE))
    engine = batch.logprobs[mask]
    gaps = (engine - policy).abs()
    change = effect(engine, policy, base)
    return {
        "mib": rollout.synced.metrics()["sync/mib"],
        "seconds": min(taken_s),
        "gap_mean": float(gaps.mean()),
        "gap_largest": float(gaps.max()),
        "change_mean": change.size,
        "share": change.share,
        "share_error": change.error,
        "tokens": change.tokens,
    }


def update(trainer: Trainer, batch: Batch, draw: torch.Generator) -> None:
    advantages = torch.randn(len(batch), 1, generator=draw) * batch.loss_mask
    batch = batch.replace(advantages=advantages)
    trainer.update(batch.replace(weights=token_weights(batch)), PPOClipLoss())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", help="a HuggingFace directory")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-5)
    options = parser.parse_args()
    counts = QUICK_UPDATES if options.quick else UPDATES
    samples = 1 if options.quick else 8
    lora = {"rank": options.rank, "alpha": float(options.rank)}
    trainer = Trainer.from_pretrained(options.model, dtype=options.dtype, lr=options.lr, lora=lora)
    engine = {"name": "embedded", "dtype": options.dtype}
    shared = {"max_turns": 1, "max_response_tokens": 24, "engine": engine}
    rollouts = {
        way: Rollout.from_pretrained(options.model, Continuations(), **shared)
        for way in ("alone", "merged")
    }
    draw = torch.Generator().manual_seed(0)
    lines: list[dict[str, Any]] = []
    try:
        rows = sampled(rollouts["alone"], 1 if options.quick else 2, step=0)
        done = 0
        for count in counts:
            while done < count:
                update(trainer, rows, draw)
                done += 1
            for way, rollout in rollouts.items():
                line = measured(rollout, trainer, way, count, samples)
                lines.append({"updates": count, "way": way, **line})
                print(
                    f"{count:4d} updates, {way:6}: {line['mib']:7.1f} MiB in {line['seconds']:.3f} s; "
                    f"gap {line['gap_mean']:.2g} (largest {line['gap_largest']:.2g}) nats, adapters "
                    f"change {line['change_mean']:.2g}, of which {line['share']:.0%} +- "
                    f"{line['share_error']:.0%} is in the engine",
                    flush=True,
                )
    finally:
        for rollout in rollouts.values():
            rollout.close()
        trainer.close()
    told = {"model": Path(options.model).name, "dtype": options.dtype, "rank": options.rank}
    told |= {"lr": options.lr, "processor": processor_name(), **versions("torch")}
    print(json.dumps({**told, "lines": lines}))


if __name__ == "__main__":
    main()
