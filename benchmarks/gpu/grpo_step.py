#!/usr/bin/env python
"""A whole GRPO step on one GPU in bfloat16: rlflow against TRL's GRPOTrainer. Never run so far.

The comparison is that of benchmarks/grpo_step.py, with a larger model, more and longer completions. Where vLLM is installed
(--vllm), TRL samples with it in the same process; otherwise with transformers' `generate`.

    python benchmarks/gpu/grpo_step.py [--quick] [--vllm]
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from gpu import require

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grpo_step as shared
from common import SHAPES


def cases(quick: bool, model: str) -> list[shared.Case]:
    vocab = SHAPES[model].vocab
    if quick:
        return [
            shared.Case("equal", model, 8, 8, 128, 1),
            shared.Case("skewed", model, 8, 8, 256, vocab // 64),
        ]
    return [
        shared.Case("equal", model, 32, 8, 512, 1),
        shared.Case("skewed", model, 32, 8, 2048, vocab // 512),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="the 18M model, short completions: under a minute"
    )
    parser.add_argument("--model", choices=SHAPES, help="(0.5B; quick: 18M)")
    parser.add_argument("--rounds", type=int, help="counted steps per side and case (5; quick: 2)")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument(
        "--kl", action="store_true", help="with a reference model and a KL term, on both sides"
    )
    parser.add_argument(
        "--microbatch", type=int, default=16, help="rows of TRL's forward pass (16)"
    )
    parser.add_argument(
        "--vllm", action="store_true", help="TRL samples with vLLM (needs the package)"
    )
    options = parser.parse_args()
    print(require("trl", *(["vllm"] if options.vllm else [])))
    threads = min(8, os.cpu_count() or 1)
    setting = shared.Setting(
        threads, "cuda", "bfloat16", options.kl, options.microbatch, options.vllm
    )
    rounds = options.rounds or (2 if options.quick else 5)
    model = options.model or ("18M" if options.quick else "0.5B")
    chosen = [case for case in cases(options.quick, model) if options.only in case.name]
    shared.run(chosen, rounds, setting, benchmark="gpu/grpo_step")


if __name__ == "__main__":
    main()
