"""What the systems claim, put to the test at toy scale with rlflow's own parts: does it reproduce, and by what numbers.

    python benchmarks/claims.py [--quick] [--only NAME] [--seeds 3 | 3,4,5] [--out DIR] [--list]

An experiment is a table of arms by seeds. Every cell runs in a process of its own, with a deadline, and its figures are a line
of DIR/cells.jsonl: the same command a second time makes what is missing. Each experiment ends with a table, a picture
(DIR/NAME.png) and a verdict by a rule that was written down before the first run; DIR/claims.md holds them all. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ.update(
    OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1"
)

import experiments
from experiments import reports
from experiments.base import Experiment, Results
from experiments.cells import Cell, CellLog, play

from rlflow.errors import ConfigError, MissingPackageError, RLFlowError
from rlflow.storage.files import plain

ROOT = Path(__file__).resolve().parent.parent
PAGE, IMAGES = ROOT / "docs" / "claims.md", ROOT / "docs" / "images"
QUICK_S = 30.0  # a cell of a quick run


def seeds_of(text: str) -> list[int]:
    """`3`: 0, 1 and 2. `3,4,5`: these; `7,`: that one. Raises ConfigError for anything else."""
    named = [part.strip() for part in text.removesuffix(",").split(",")]
    numbers = [int(part) for part in named if part.isdecimal()]
    if (
        len(numbers) != len(named)
        or len(set(numbers)) != len(numbers)
        or (numbers == [0] and "," not in text)
    ):
        raise ConfigError(
            f"--seeds: expected how many (1 or more), or seeds such as 3,4,5; found '{text}'."
        )
    return numbers if "," in text else list(range(numbers[0]))


def cells_of(experiment: Experiment, seeds: Sequence[int], quick: bool) -> list[Cell]:
    """Arm by arm within a seed: what is known of a run that was stopped is known of all arms."""
    arms = experiment.arms_of(quick)
    return [
        Cell(experiment.name, arm, seed, quick, experiment.version)
        for seed in seeds
        for arm in arms
    ]


def make_missing(
    chosen: list[Experiment], log: CellLog, seeds: Sequence[int], quick: bool
) -> list[str]:
    """Runs every cell that has no figures yet; returns what failed. A failed cell is run again next time."""
    missing = [
        (one, cell)
        for one in chosen
        for cell in cells_of(one, seeds, quick)
        if log.get(cell) is None
    ]
    for module in dict.fromkeys(name for one, _ in missing for name in one.imports):
        importlib.import_module(module)
    failed, started = [], time.monotonic()
    from rlflow.devices.matmul import processor_name

    for count, (experiment, cell) in enumerate(missing, 1):
        work = functools.partial(experiment.run, cell.arm, cell.seed, quick)
        figures, why, seconds = play(work, QUICK_S if quick else experiment.deadline_s)
        if figures is None:
            failed.append(f"{cell.experiment}, {cell.arm}, seed {cell.seed}: {why}")
        else:
            log.append(cell, figures, seconds=round(seconds, 2), processor=processor_name())
            why = ", ".join(
                f"{name} {reports.number(_value(figures, name))}" for name in experiment.columns[:3]
            )
        left = (time.monotonic() - started) / count * (len(missing) - count)
        told = f"[{count}/{len(missing)}] {cell.experiment}, {cell.arm}, seed {cell.seed}: {why} ({seconds:.1f} s"
        print(
            f"{told}; about {left / 60:.0f} min left)" if left >= 60 else f"{told})",
            file=sys.stderr,
            flush=True,
        )
    return failed


def _value(figures: dict, name: str) -> float:
    value = figures.get(name)
    return float("nan") if value is None else float(value)


def results_of(
    experiment: Experiment, log: CellLog, seeds: Sequence[int], quick: bool
) -> tuple[Results, int]:
    """(figures of the arms that have any, how many cells have none)."""
    results: dict[str, list] = {}
    missing = 0
    for cell in cells_of(experiment, seeds, quick):
        figures = log.get(cell)
        missing += figures is None
        if figures is not None:
            results.setdefault(cell.arm, []).append(figures)
    return {arm: results[arm] for arm in experiment.arms if arm in results}, missing


def tell(
    experiment: Experiment, results: Results, missing: int, quick: bool, out: Path
) -> tuple[dict, str]:
    """Prints table and verdict, draws the picture. Returns the summary and the Markdown."""
    verdict = None if missing or quick else experiment.judge(results)
    said = (
        reports.said(verdict)
        if verdict
        else f"none, {missing} cells are missing"
        if missing
        else "none, a quick run"
    )
    picture = None
    try:
        if results:
            reports.draw(experiment, results, out / f"{experiment.name}.png")
            picture = f"{experiment.name}.png"
    except MissingPackageError as error:
        print(f"claims: {error}", file=sys.stderr)
    print(
        f"\n{experiment.name}: {experiment.system}\n{experiment.claim}\n\n{reports.table(experiment, results)}\n\n{said}\n"
    )
    found = {
        "reproduces": None if verdict is None else verdict[0],
        "verdict": said,
        "missing": missing,
    }
    return {**found, "arms": reports.summary(experiment, results)}, reports.section(
        experiment, results, said, picture
    )


def write_page(experiment: Experiment, markdown: str, out: Path) -> None:
    """Puts a whole experiment into docs/claims.md, and its picture into docs/images."""
    image = IMAGES / f"claims_{experiment.name}.png"
    drawn = out / f"{experiment.name}.png"
    if drawn.is_file():
        image.write_bytes(drawn.read_bytes())
    text = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else "# Claims\n"
    block = markdown.replace(f"]({drawn.name})", f"](images/{image.name})")
    PAGE.write_text(reports.with_block(text, experiment.name, block), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="two arms, one seed, the fewest steps: under a minute, no verdict",
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="this experiment; may be given several times",
    )
    parser.add_argument(
        "--seeds", default="3", metavar="N", help="how many, from 0 (3); or which: 3,4,5"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where cells, tables and pictures go (runs/claims)"
    )
    parser.add_argument(
        "--list", action="store_true", help="the experiments, their claims and arms; runs nothing"
    )
    parser.add_argument(
        "--docs", action="store_true", help="also put whole experiments into docs/claims.md"
    )
    args = parser.parse_args(arguments)
    try:
        chosen = experiments.load(args.only or ())
        seeds = [0] if args.quick else seeds_of(args.seeds)
    except RLFlowError as error:
        print(f"claims: {error}", file=sys.stderr)
        return 2
    if args.list:
        for one in chosen:
            print(
                f"{one.name}: {one.system}\n    claim: {one.claim}\n    rule:  {one.rule}\n    arms:  {'; '.join(one.arms)}"
            )
        return 0
    out = args.out or ROOT / "runs" / ("claims_quick" if args.quick else "claims")
    return run(chosen, out, seeds=seeds, quick=args.quick, docs=args.docs)


def run(
    chosen: list[Experiment], out: Path, *, seeds: Sequence[int], quick: bool, docs: bool
) -> int:
    """Everything that a call asks for; 1 where a cell failed."""
    started = time.monotonic()
    log = CellLog(out / "cells.jsonl")
    try:
        failed = make_missing(chosen, log, seeds, quick)
    except KeyboardInterrupt:
        print(
            f"claims: interrupted; what was made is in {log.path}, the same command goes on.",
            file=sys.stderr,
        )
        return 130
    out.mkdir(parents=True, exist_ok=True)
    summaries, sections = {}, []
    for experiment in chosen:
        results, missing = results_of(experiment, log, seeds, quick)
        summaries[experiment.name], markdown = tell(experiment, results, missing, quick, out)
        sections.append(markdown)
        if docs and not quick and not missing:
            write_page(experiment, markdown, out)
    (out / "claims.md").write_text("# Claims\n\n" + "\n".join(sections), encoding="utf-8")
    for problem in failed:
        print(f"claims: {problem}", file=sys.stderr)
    from common import versions

    from rlflow.devices.matmul import processor_name

    result = {
        "benchmark": "claims",
        "versions": {
            "python": platform.python_version(),
            **versions("rlflow", "torch", "transformers"),
        },
        "processor": processor_name(),
        "quick": quick,
        "seeds": seeds,
        "seconds": round(time.monotonic() - started, 1),
        "failed": len(failed),
        "experiments": summaries,
    }
    print(json.dumps(plain(result)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
