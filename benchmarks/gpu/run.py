#!/usr/bin/env python
"""Everything that is worth measuring on one GPU, in one command: under 8 minutes, without a network. Never run on a GPU so far.

Each line of the table is measured in a process of its own, with a deadline. What is not installed is left out and says so; on a
machine without a GPU all of it is, and the exit code is 0. The last line is one JSON object.

    python benchmarks/gpu/run.py
    python benchmarks/gpu/run.py --only train
    python benchmarks/gpu/run.py --device cpu --quick      # the script itself, on tiny shapes: the figures mean nothing
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import versions

SECTION_S = 120.0
BUDGET_S = 8 * 60.0


def plan(quick: bool) -> list[tuple[str, str, dict[str, Any]]]:
    """(name, section, its options), the most telling first: what comes last is left out where time runs out."""
    models = ("tiny",) if quick else ("0.5B", "1.5B", "3B")
    large, small = models[-1], models[0]
    jobs: list[tuple[str, str, dict[str, Any]]] = [("matrix rate", "matrix", {})]
    for layers in ("te", "local"):
        jobs.append((f"train {large} {layers}", "train", {"model": large, "layers": layers, "adapters": False}))
    jobs.append(("sync and gap", "agree", {"model": small}))
    jobs += [(f"decode {engine}", "decode", {"engine": engine, "model": large, "concurrency": 4 if quick else 128})
             for engine in ("embedded", "vllm")]  # fmt: skip
    jobs.append((f"train {large} LoRA", "train", {"model": large, "layers": "te", "adapters": True}))
    jobs += [(f"retrieval {index}", "retrieve", {"index": index}) for index in ("torch", "faiss")]
    jobs.append(("GPU tests", "tests", {}))
    for model in models[:-1]:
        for layers, adapters in (("te", False), ("local", False), ("te", True)):
            options = {"model": model, "layers": layers, "adapters": adapters}
            jobs.append((f"train {model} {layers}{' LoRA' if adapters else ''}", "train", options))
    return jobs


def measure(
    section: str, options: dict[str, Any], device: str, quick: bool, limit_s: float
) -> tuple[list[dict[str, Any]], str]:
    """(rows, why there are none), from a process of its own."""
    command = [sys.executable, __file__, "--section", section, "--options", json.dumps(options), "--device", device]
    try:
        done = subprocess.run(
            [*command, *(["--quick"] if quick else [])], capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return [], f"not done after {limit_s:.0f} s"
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = [line for line in done.stderr.strip().splitlines() if line.strip()]
        return [], f"failed: {said[-1][:200] if said else f'exit code {done.returncode}'}"
    answer = json.loads(lines[-1])
    return answer["rows"], answer["skipped"]


def one_section(section: str, options: dict[str, Any], device: str, quick: bool) -> None:
    """Prints one JSON line: the rows of a section, or why it was skipped."""
    import sections

    try:
        rows, skipped = getattr(sections, section)(device, quick, **options), ""
    except sections.Skipped as reason:
        rows, skipped = [], str(reason)
    print(json.dumps({"rows": rows, "skipped": skipped}))


def device_name() -> str | None:
    """The GPU's name; None without one."""
    try:
        import torch
    except ImportError:
        return None
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the lines whose name contains this")
    parser.add_argument("--quick", action="store_true", help="tiny shapes: does the script work?")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", metavar="FILE", help="write the JSON there too")
    parser.add_argument(
        "--minutes", type=float, default=BUDGET_S / 60, help="what has not begun by then is left out (8)"
    )
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--options", default="{}", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.section:
        one_section(given.section, json.loads(given.options), given.device, given.quick)
        return 0
    gpu = device_name() if given.device == "cuda" else platform.processor() or "CPU"
    packages = versions("rlflow", "torch", "megatron-core", "transformers")
    print(f"{gpu or 'no GPU'} | " + ", ".join(f"{name} {number}" for name, number in packages.items()))
    started, results = time.monotonic(), []
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name, section, options in plan(given.quick):
        if given.only not in name:
            continue
        left_s = given.minutes * 60 - (time.monotonic() - started)
        if gpu is None:
            rows, why = [], "no NVIDIA GPU that torch sees"
        elif left_s <= 0:
            rows, why = [], "no time left (--minutes)"
        else:
            rows, why = measure(section, options, given.device, given.quick, min(SECTION_S, left_s))
        results.append({"name": name, "rows": rows, "skipped": why})
        show(name, rows, why, results)
    found = {"benchmark": "gpu", "gpu": gpu, "versions": {"python": platform.python_version(), **packages}, "results": results,
             "seconds": time.monotonic() - started}  # fmt: skip
    if given.out:
        Path(given.out).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found))
    return 0


def show(name: str, rows: list[dict[str, Any]], why: str, results: list[dict[str, Any]]) -> None:
    """Prints the lines of the table; a training line with its share of the matrix rate that was measured first."""
    rate = next(
        (row["figure"] * 1e12 for result in results for row in result["rows"] if row["unit"] == "TFLOP/s"), None
    )
    for row in rows:
        flops = row.get("flops_per_s")
        share = (
            f", {flops / 1e12:.1f} TFLOP/s" + (f" = {flops / rate:.1%} of the matrix rate" if rate else "")
            if flops
            else ""
        )
        if flops and rate:
            row["utilization"] = flops / rate
        memory = f", {row['peak_gib']:.1f} GiB" if row.get("peak_gib") else ""
        print(f"{row['what']:<60}{row['figure']:>14,.4g} {row['unit']}{share}{memory}", flush=True)
    if not rows:
        print(f"{name:<60}{'-':>14} {why}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
