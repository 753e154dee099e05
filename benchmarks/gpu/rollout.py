#!/usr/bin/env python
"""Sampling on one GPU in bfloat16. Never run so far.

First the comparison of benchmarks/rollout.py: the embedded engine against transformers' `generate` on multi-turn episodes.
Then the engine alone: tokens decoded per second at the shape of Qwen2.5-3B with random weights, by the number of sequences at a
time, short prompts, CUDA graphs on.

    python benchmarks/gpu/rollout.py [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu import require

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import rollout as shared
from common import SHAPES, summary, versions, write_random_model

PROMPT = 128  # tokens
BASELINE = "transformers"


def compare(path: Path, workload: shared.Workload, rounds: int) -> dict[str, Any]:
    """The table of benchmarks/rollout.py, both sides on the GPU."""
    play = shared.rlflow_side(path, workload, "bfloat16", "cuda")
    rival = shared.transformers_side(path, workload, "bfloat16", "cuda")
    sides = {BASELINE: lambda: shared.measured(rival), "rlflow": lambda: shared.measured(play)}
    return shared.summary(shared.interleave(sides, rounds), workload.generated)


def decode(path: Path, vocab: int, concurrency: int, length: int, rounds: int) -> dict[str, Any]:
    """Tokens/s of the embedded engine with `concurrency` sequences of `length` new tokens; one round beforehand is not
    counted."""
    import torch

    from rlflow.rollout.embedded.engine import EmbeddedEngine
    from rlflow.rollout.engine import Sampling

    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, vocab, (concurrency, PROMPT), generator=draw).tolist()
    engine = EmbeddedEngine(
        path, max_concurrency=concurrency, max_tokens=PROMPT + length, dtype="bfloat16", device="cuda"
    )

    async def play(number: int) -> None:
        await asyncio.gather(
            *(engine.generate(prompt, Sampling(length), f"{number}/{row}") for row, prompt in enumerate(prompts))
        )
        for row in range(concurrency):
            engine.release(f"{number}/{row}")

    rates = []
    for number in range(rounds + 1):
        started = time.perf_counter()
        asyncio.run(play(number))
        rates.append(concurrency * length / (time.perf_counter() - started))
    return {"concurrency": concurrency, "new_tokens": length, "tokens_per_s": summary(rates[1:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the 18M model, short sequences: under a minute")
    parser.add_argument("--rounds", type=int, help="counted rounds (5; quick: 1)")
    parser.add_argument("--concurrency", type=int, nargs="+", help="sequences at a time (1 16 64 256; quick: 16)")
    options = parser.parse_args()
    name = require("transformers")
    rounds = options.rounds or (1 if options.quick else 5)
    packages = versions("rlflow", "torch", "transformers")
    print(name, "|", ", ".join(f"{package} {number}" for package, number in packages.items()))
    scale, model, decoded = (1 / 3, "18M", "18M") if options.quick else (1.0, "93M", "3B")
    workload = shared.make_workload(64, 8, 4, scale)
    with tempfile.TemporaryDirectory() as directory:
        shared.make_model(Path(directory), model)
        table = compare(Path(directory), workload, rounds)
    shared.print_table(table, BASELINE)
    counts = options.concurrency or ([16] if options.quick else [1, 16, 64, 256])
    with tempfile.TemporaryDirectory() as directory:
        write_random_model(Path(directory), SHAPES[decoded], "bfloat16", "cuda", eos_token_id=None)
        length, vocab = (64 if options.quick else 512), SHAPES[decoded].vocab
        decoding = [decode(Path(directory), vocab, count, length, rounds) for count in counts]
    for row in decoding:
        print(f"{decoded}, {row['concurrency']:>4} at a time: {row['tokens_per_s']['median']:.0f} tokens/s decoded")
    print(
        json.dumps(
            {
                "benchmark": "gpu/rollout",
                "gpu": name,
                "versions": {"python": platform.python_version(), **packages},
                "rounds": rounds,
                "sides": table,
                "decoding": {"model": decoded, "prompt_tokens": PROMPT, "results": decoding},
            }
        )
    )


if __name__ == "__main__":
    main()
