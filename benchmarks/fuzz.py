"""Nonsense of every kind, and what becomes of it: refused in one line, or answered right, in time, in flat memory.

    python benchmarks/fuzz.py [--quick] [--minutes 10] [--seed 0] [--only TARGET [--case NUMBER]]

server          random JSON, bytes and HTTP against a retrieval server, which must answer right questions right in between
indices         damaged folders of eight kinds of index, corpora and offsets: answers as of the whole one, or refused
corpora         random rows: read as an independent reading says, or refused
checkpoints     damaged torch_dist, legacy and safetensors files and checkpoints of runs: converted or resumed exactly, or refused
configurations  random values, overrides and bytes of a configuration
environments    exceptions, exits, delays, hangs and surrogates in an environment under `rlflow train`
peers           silent and slow peers on every port: retrieval server, page, swarm; an honest one is served
faults          process pools, forks, calls without an end, few places, a held interpreter in an environment, one by one

Each case runs in a process of its own with a deadline. Wrong are: a traceback, another end than a result or one line of why
not, a crash, a hang, a wrong answer, a gigabyte for a few kilobytes. Every case is drawn from the seed, its target and its
number alone, so that --only and --case repeat it. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.append(str(Path(__file__).resolve().parents[1]))  # for `tests`
os.environ.update(
    OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1"
)

SHARES = {"server": 0.15, "indices": 0.15, "corpora": 0.1, "checkpoints": 0.25, "configurations": 0.15, "environments": 0.2,
          "peers": 0.05, "faults": 0.2}  # fmt: skip
"""Of the time, by target."""
SEARCH = (
    "faiss",
    "bm25s",
    "rlflow_environments.retrieval.building",
    "rlflow_environments.retrieval.server.loading",
)
TRAINING = (
    "transformers",
    "rlflow.loop",
    "rlflow.rollout.embedded.embedded_engine",
    "rlflow.trainer.megatron",
)
IMPORTED = {
    "server": SEARCH,
    "indices": SEARCH,
    "corpora": ("rlflow_environments.retrieval.records",),
    "checkpoints": (
        *TRAINING,
        "rlflow_tools.ckpt_convert.export_model",
        "rlflow_tools.ckpt_convert.import_model",
    ),
    "configurations": TRAINING,
    "environments": TRAINING,
    "peers": ("rlflow_tools.view.live", "rlflow_environments.swarm.tcp"),
    "faults": TRAINING,
}
"""By target: once here, so that a case's fork has it."""


def make_target(name: str):
    modules = {"indices": "search_files", "corpora": "search_files"}
    return getattr(
        importlib.import_module(f"fuzzing.{modules.get(name, name)}"), name.capitalize()
    )()


def fuzz(seconds: float, seed: int, targets: list[str], case: int | None = None) -> dict[str, dict]:
    """{target: its report}, of so many seconds in all."""
    from fuzzing.cases import play

    for module in dict.fromkeys(
        module for name in targets for module in ("rlflow.commands.cli", *IMPORTED[name])
    ):
        importlib.import_module(module)
    shares = sum(SHARES[name] for name in targets)
    reports = {}
    with tempfile.TemporaryDirectory(prefix="rlflow-fuzz-") as folder:
        for name in targets:
            found = play(
                name,
                make_target(name),
                seed,
                Path(folder) / name,
                seconds * SHARES[name] / shares,
                case,
            )
            reports[name] = asdict(found)
            told = f"{name:>14}: {found.cases:>6,} cases, {found.accepted:,} accepted, {len(found.wrong)} wrong"
            figures = ", ".join(f"{key} {value:.3g}" for key, value in found.figures.items())
            print(
                f"{told}, slowest {found.slowest_s:.1f} s{', ' if figures else ''}{figures}",
                flush=True,
            )
    return reports


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="half a minute")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=SHARES, help="one target")
    parser.add_argument("--case", type=int, metavar="NUMBER", help="of that target, one case")
    args = parser.parse_args()
    if args.case is not None and args.only is None:
        parser.error("--case needs --only")
    targets = [args.only] if args.only else list(SHARES)
    started = time.monotonic()
    reports = fuzz(30.0 if args.quick else args.minutes * 60, args.seed, targets, args.case)
    from common import versions

    from rlflow.devices.matmul import processor_name

    result = {
        "benchmark": "fuzz",
        "versions": {
            "python": platform.python_version(),
            **versions("rlflow", "torch", "megatron-core", "faiss-cpu"),
        },
        "processor": processor_name(),
        "seed": args.seed,
        "seconds": round(time.monotonic() - started, 1),
        "cases": sum(report["cases"] for report in reports.values()),
        "wrong": sum(len(report["wrong"]) for report in reports.values()),
        "targets": reports,
    }
    print(json.dumps(result))
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
