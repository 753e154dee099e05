"""Which kernel with which correction still learns from stale samples: every combination that is allowed, at staleness 0 to 64.

    python benchmarks/safety.py [--quick] [--seeds 3] [--lr 0.05] [--out DIR] [--docs]

The task's optimum is known, and the policy is a table of logits (experiments/table_policy.py says what is real). A cell is a run
of a second; its figures are a line of DIR/cells.jsonl, so that the same command goes on where it was stopped. --docs writes the
table into docs/safety.md. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")

from experiments.base import Figures
from experiments.cells import Cell, CellLog
from experiments.reports import with_block

from rlflow.errors import ConfigError, RLFlowError

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "safety.md"
VERSION = 1

LAGS = (0, 1, 4, 16, 64)
STEPS, MINIBATCHES, LR = 128, 2, 0.05
REACHED = 0.95  # of the expected reward, 1 at the optimum
STUCK = 0.05  # nats per letter: below it a policy that is wrong will hardly find out any more
SIGNS = {"reaches": "+", "on its way": "o", "collapses": "x"}

KERNELS: dict[str, dict[str, Any]] = {
    "ppo_clip": {"name": "ppo_clip"},
    "gspo": {"name": "gspo"},
    "gspo, token": {"name": "gspo", "level": "token"},
    "gmpo": {"name": "gmpo"},
    "cispo": {"name": "cispo"},
    "aipo": {"name": "aipo"},
    "soft_adaptive": {"name": "soft_adaptive"},
    "reinforce": {"name": "reinforce"},
}
CORRECTIONS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "none": ("rollout", []),
    "none, anchor proximal": ("proximal", []),
    "tis": ("proximal", [{"name": "tis"}]),
    "mis": ("proximal", [{"name": "mis"}]),
    "mis, geometric, 0.5 to 2": (
        "proximal",
        [{"name": "mis", "level": "geometric", "low": 0.5, "high": 2.0}],
    ),
    "icepop": ("proximal", [{"name": "icepop"}]),
    "decoupled": ("proximal", [{"name": "decoupled"}]),
    "decoupled, loglinear": ("proximal", [{"name": "decoupled", "proximal": "loglinear"}]),
    "kpop": ("rollout", [{"name": "kpop"}]),
    "dppo": ("rollout", [{"name": "dppo"}]),
    "sequence_mask 0.5": ("rollout", [{"name": "sequence_mask", "threshold": 0.5}]),
    "m2po, mask": ("rollout", [{"name": "m2po"}]),
    "m2po, winsor": ("rollout", [{"name": "m2po", "variant": "winsor"}]),
    "m2po, range 0.004": ("rollout", [{"name": "m2po", "variant": "range", "threshold": 0.004}]),
    "m2po, mask_all, decoupled": (
        "proximal",
        [{"name": "m2po", "variant": "mask_all"}, {"name": "decoupled"}],
    ),
}
"""Name -> (the anchor that it is made for, transforms)."""


def section(kernel: str, correction: str) -> dict[str, Any]:
    """The `algorithm` section of a combination; its defaults are those of the parts."""
    anchor, transforms = CORRECTIONS[correction]
    loss = dict(KERNELS[kernel])
    if kernel != "reinforce":
        loss["anchor"] = anchor
    if (
        kernel == "ppo_clip" and correction == "m2po, mask"
    ):  # as its paper has it: the mask in place of the clip
        loss |= {"clip_low": None, "clip_high": None}
    return {"losses": [loss], "transforms": transforms, "minibatches_per_step": MINIBATCHES}


def refused(kernel: str, correction: str) -> str:
    """Why a combination makes no sense, as `rlflow train` says it; empty where it does."""
    from experiments.table_policy import make_algorithm

    if (
        kernel == "reinforce"
        and CORRECTIONS[correction][0] == "proximal"
        and not CORRECTIONS[correction][1]
    ):
        return "it has no ratio, so no anchor"
    try:
        make_algorithm(section(kernel, correction), 0)
    except ConfigError as error:
        return str(error)
    return ""


def measured(
    kernel: str, correction: str, lag: int, seed: int, steps: int = STEPS, lr: float = LR
) -> Figures:
    """A cell: what becomes of the expected reward, and of the entropy."""
    from experiments import table_policy as table

    algorithm, right = (
        table.make_algorithm(section(kernel, correction), seed),
        table.right_answers(seed),
    )
    trainer = table.TableTrainer(lr=lr)
    rewards, error = [table.expected_reward(trainer.logprobs(), right)], ""
    try:
        for _ in table.train_table(algorithm, trainer, right, steps=steps, lag=lag, seed=seed):
            rewards.append(table.expected_reward(trainer.logprobs(), right))
    except RLFlowError as failure:  # a loss or a gradient that is not finite
        error = str(failure)
    if error or not math.isfinite(rewards[-1]):
        return {"reward": None, "best": max(rewards), "entropy": None, "error": error}
    return {
        "reward": rewards[-1],
        "best": max(rewards),
        "entropy": table.entropy(trainer.logprobs()),
    }


def verdict(figures: list[Figures]) -> str:
    """What a combination does at a staleness, by the median seed."""
    if any(one["reward"] is None for one in figures):
        return "collapses"
    reward, spread = (
        statistics.median(one[name] for one in figures) for name in ("reward", "entropy")
    )
    if reward >= REACHED:
        return "reaches"
    from experiments.table_policy import CHANCE

    return "collapses" if reward < CHANCE or spread < STUCK else "on its way"


def make_cells(
    log: CellLog, seeds: int, quick: bool, lr: float
) -> tuple[dict[tuple[str, str], dict[int, list[Figures]]], dict]:
    """({(kernel, correction): {staleness: figures of the seeds}}, {(kernel, correction): why it is refused})."""
    results: dict[tuple[str, str], dict[int, list[Figures]]] = {}
    reasons = {}
    name = "safety" if lr == LR else f"safety, lr {lr:g}"
    pairs = [(kernel, correction) for kernel in KERNELS for correction in CORRECTIONS]
    for number, (kernel, correction) in enumerate(pairs, 1):
        reason = refused(kernel, correction)
        if reason:
            reasons[kernel, correction] = reason
            continue
        started = time.monotonic()
        found = results[kernel, correction] = {}
        for lag in (0, 4) if quick else LAGS:
            for seed in range(seeds):
                cell = Cell(name, f"{kernel}; {correction}; {lag}", seed, quick, VERSION)
                if log.get(cell) is None:
                    log.append(
                        cell,
                        measured(kernel, correction, lag, seed, steps=8 if quick else STEPS, lr=lr),
                    )
                found.setdefault(lag, []).append(log.get(cell) or {})
        told = " ".join(f"{lag}:{verdict(found[lag])}" for lag in found)
        print(
            f"[{number}/{len(pairs)}] {kernel}, {correction}: {told} ({time.monotonic() - started:.1f} s)",
            file=sys.stderr,
            flush=True,
        )
    return results, reasons


def tables(results: dict[tuple[str, str], dict[int, list[Figures]]]) -> str:
    """Two Markdown tables, a sign per staleness and the expected reward at the end, and how far seeds differ."""
    head = (
        "| correction | "
        + " | ".join(f"`{kernel}`" for kernel in KERNELS)
        + " |\n"
        + "|---" * (len(KERNELS) + 1)
        + "|\n"
    )
    signs, rewards = [], []
    for correction in CORRECTIONS:
        row, numbers = [], []
        for kernel in KERNELS:
            found = results.get((kernel, correction))
            row.append(
                "`" + "".join(SIGNS[verdict(found[lag])] for lag in found) + "`" if found else "-"
            )
            numbers.append(
                " ".join(_median(found[lag]) for lag in (4, 16, 64) if lag in found)
                if found
                else "-"
            )
        signs.append(f"| {correction} | " + " | ".join(row) + " |\n")
        rewards.append(f"| {correction} | " + " | ".join(numbers) + " |\n")
    told = "Expected reward at the end for staleness 4, 16 and 64 (optimum 1, chance 0.125):"
    return f"{head}{''.join(signs)}\n{spread(results)}\n\n{told}\n\n{head}{''.join(rewards)}"


def spread(results: dict[tuple[str, str], dict[int, list[Figures]]]) -> str:
    """How far the seeds of a cell differ: in the reward, and where in what they come to."""
    gaps, several = [], []
    for (kernel, correction), found in results.items():
        for lag, figures in found.items():
            rewards = [one["reward"] for one in figures if one["reward"] is not None]
            gaps.append(max(rewards) - min(rewards) if rewards else 0.0)
            if len({verdict([one]) for one in figures}) > 1:
                several.append((lag, f"`{kernel}` with {correction}"))
    seeds = max(len(figures) for found in results.values() for figures in found.values())
    if seeds == 1:
        return "Of one seed."
    by_lag = [
        f"at {lag}: {', '.join(who for at, who in several if at == lag)}"
        for lag in sorted({at for at, _ in several})
    ]
    told = f"The median of {seeds} seeds. From the worst to the best one the reward differs by {statistics.median(gaps):.3f} in "
    told += f"the median combination and by {max(gaps):.2f} at the most. "
    return told + (
        f"Seeds come to different signs {'; '.join(by_lag)}."
        if several
        else "All seeds come to the same signs."
    )


def _median(figures: list[Figures]) -> str:
    found = [one["reward"] for one in figures]
    return "NaN" if None in found else f"{statistics.median(found):.2f}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="eight steps at staleness 0 and 4: under a minute, says nothing",
    )
    parser.add_argument(
        "--seeds", type=int, default=3, help="0 to N - 1 (3); the median seed counts"
    )
    parser.add_argument("--lr", type=float, default=LR, help=f"of the table's AdamW ({LR})")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the cells go (runs/safety)")
    parser.add_argument(
        "--docs", action="store_true", help="also write the table into docs/safety.md"
    )
    args = parser.parse_args(arguments)
    if args.seeds < 1 or not 0 < args.lr < math.inf:
        told = f"expected 1 or more seeds and a rate above 0, found {args.seeds} and {args.lr:g}"
        print(f"safety: --seeds, --lr: {told}.", file=sys.stderr)
        return 2
    started = time.monotonic()
    logging.disable(
        logging.WARNING
    )  # that updates without any gradient were left out is no news here
    out = args.out or ROOT / "runs" / ("safety_quick" if args.quick else "safety")
    log = CellLog(out / "cells.jsonl")
    try:
        results, reasons = make_cells(log, 1 if args.quick else args.seeds, args.quick, args.lr)
    except KeyboardInterrupt:
        print(
            f"safety: interrupted; what was made is in {log.path}, the same command goes on.",
            file=sys.stderr,
        )
        return 130
    table = tables(results)
    print(
        f"{table}\n{', '.join(f'{sign} {name}' for name, sign in SIGNS.items())}, - refused; staleness {LAGS}\n"
    )
    if args.docs and not args.quick and args.lr == LR:
        PAGE.write_text(
            with_block(PAGE.read_text(encoding="utf-8"), "benchmarks/safety.py", table),
            encoding="utf-8",
        )
    from common import versions

    from rlflow.devices.matmul import processor_name

    told = {
        f"{kernel}; {correction}": {lag: verdict(one) for lag, one in found.items()}
        for (kernel, correction), found in results.items()
    }
    result = {
        "benchmark": "safety",
        "versions": {"python": platform.python_version(), **versions("rlflow", "torch")},
        "processor": processor_name(),
        "quick": args.quick,
        "lr": args.lr,
        "seeds": 1 if args.quick else args.seeds,
        "seconds": round(time.monotonic() - started, 1),
        "refused": len(reasons),
        "combinations": told,
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
