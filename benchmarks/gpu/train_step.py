#!/usr/bin/env python
"""Training on one GPU in bfloat16. Never run so far.

First the comparison of benchmarks/train_step.py: the Megatron trainer against transformers and torch (autocast), the same
weights, batch and loss. Then the trainer alone at the shape of Qwen2.5-3B with random weights, rows of skewed lengths packed
into micro-batches of 8,192 tokens: tokens/s, and model FLOPs utilization, the share of the GPU's dense bfloat16 peak that the
model's own operations make (benchmarks/flops.py; recomputed activations count nothing).

    python benchmarks/gpu/train_step.py [--quick] [--peak-tflops N]
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu import require

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import train_step as shared
from common import SHAPES, interleave, summary, versions, write_random_model
from flops import peak_flops, training_flops

PACK = (2048, 1536, 1024, 1024, 896, 640, 512, 384, 128)  # tokens of rows that fill a micro-batch of 8,192


def cases(quick: bool) -> list[shared.Case]:
    if quick:
        return [shared.Case("18M", "skewed", (1024, 448, 320, 256), True)]
    equal, skewed = (1024,) * 8, (4096, 1792, 1280, 1024, 768, 640, 512, 384)
    return [shared.Case("0.5B", "equal", equal, False), shared.Case("0.5B", "skewed", skewed, True)]


def utilization(
    case: shared.Case, path: Path, rounds: int, setting: shared.Setting, peak: float | None
) -> dict[str, Any]:
    """Tokens/s, model FLOP/s and their share of the peak, of the Megatron trainer alone."""
    steps = interleave(
        {shared.OURS: (shared.rlflow_side, path, case, setting)},
        rounds,
        threads=setting.threads,
        device=setting.device,
    )[shared.OURS][1:]
    scored = sum(case.lengths) - len(case.lengths)  # the first token of a row has nothing that predicts it
    flops = training_flops(SHAPES[case.model], case.lengths, scored)
    rates = summary([flops / step["wall_s"] for step in steps])
    return {
        "case": case.name,
        "tokens": sum(case.lengths),
        "flops": flops,
        "tokens_per_s": summary([sum(case.lengths) / step["wall_s"] for step in steps]),
        "flops_per_s": rates,
        "peak_flops_per_s": peak,
        "utilization": None if peak is None else rates["median"] / peak,
        "peak_mib": max(step["peak_mib"] for step in steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the 18M model, a few rows: under a minute")
    parser.add_argument("--rounds", type=int, help="counted steps (10; quick: 3)")
    parser.add_argument("--microbatches", type=int, default=4, help="of 8,192 tokens in a step at the 3B shape (4)")
    parser.add_argument("--peak-tflops", type=float, help="of the GPU in bfloat16, where flops.py does not know it")
    parser.add_argument(
        "--recompute",
        choices=("none", "selective", "full"),
        default="selective",
        help="activations computed again in the backward pass at the 3B shape (selective: fits 80 GB)",
    )
    parser.add_argument("--skip-comparison", action="store_true", help="only the 3B shape")
    options = parser.parse_args()
    name = require("transformers")
    peak = options.peak_tflops * 1e12 if options.peak_tflops else peak_flops(name)
    rounds = options.rounds or (3 if options.quick else 10)
    setting = shared.Setting(threads=4, device="cuda", dtype="bfloat16")
    packages = versions("rlflow", "torch", "transformers", "megatron-core")
    print(name, "|", ", ".join(f"{package} {number}" for package, number in packages.items()))
    results = []
    for case in [] if options.skip_comparison else cases(options.quick):
        with tempfile.TemporaryDirectory() as directory:
            write_random_model(Path(directory), SHAPES[case.model], device="cuda")
            results.append(shared.compare(case, Path(directory), rounds, setting))
        shared.print_result(results[-1])
    large = shared.Case(
        "18M" if options.quick else "3B", "packed 8k", PACK * options.microbatches, True, tokens_per_microbatch=8192
    )
    with tempfile.TemporaryDirectory() as directory:
        write_random_model(Path(directory), SHAPES[large.model], "bfloat16", "cuda")
        alone = replace(setting, recompute=options.recompute)
        used = utilization(large, Path(directory), rounds, alone, peak)
    share = "unknown: give --peak-tflops" if peak is None else f"{used['utilization']:.1%} of {peak / 1e12:.0f} TFLOP/s"
    print(
        f"{large.name}: {used['tokens_per_s']['median']:.0f} tokens/s, {used['flops_per_s']['median'] / 1e12:.0f} TFLOP/s, "
        f"model FLOPs utilization {share}, {used['peak_mib'] / 1024:.1f} GiB reserved"
    )
    print(
        json.dumps(
            {
                "benchmark": "gpu/train_step",
                "gpu": name,
                "versions": {"python": platform.python_version(), **packages},
                "rounds": rounds,
                "recompute": options.recompute,
                "results": results,
                "utilization": used,
            }
        )
    )


if __name__ == "__main__":
    main()
