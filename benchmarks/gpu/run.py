#!/usr/bin/env python
"""The first hour on a GPU: five calls of at most ten minutes, each of use alone, without a network.

    python benchmarks/gpu/run.py --part 1 --out gpu     # is the trainer right?
    python benchmarks/gpu/run.py --part 2 --out gpu     # are engine and weight transfer right?
    python benchmarks/gpu/run.py --part 3 --out gpu     # how fast is training?
    python benchmarks/gpu/run.py --part 4 --out gpu     # Transformer Engine
    python benchmarks/gpu/run.py --part 5 --out gpu     # vLLM, decoding, retrieval
    python benchmarks/gpu/run.py --part 1 --cpu         # the script itself, on tiny shapes

Each case is a process with a deadline: one that hangs or fails costs the others nothing. Figures
go to OUT/partN.jsonl as they come; the table comes at the end, and the last line is one JSON
object. What is not installed is left out and says so. --wheels DIR: packages to bring along,
unpacked into OUT/packages: wheels, parts of wheels (NAME.whl.0, NAME.whl.1, ...), and source
archives, which are built with what is there."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from machine import ROOT, Report, Skipped, command, last_line, specification
from session import MINUTES, Case, plan
from wheels import bring

SKIPPED = 3  # exit code of a case that cannot run here; its last line says why
LEAST_S = 5.0  # of a case that is begun


def one_case(text: str) -> int:
    """A child's whole life."""
    asked = json.loads(text)
    fields = asked["report"]
    report = Report(
        **{**fields, **{name: Path(fields[name]) for name in ("folder", "models", "lines")}}
    )
    module, _, function = asked["place"].partition(":")
    try:
        getattr(importlib.import_module(module), function)(report, **asked["options"])
    except Skipped as reason:
        print(reason, file=sys.stderr)
        return SKIPPED
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("rlflow"):
            raise
        print(f"not installed: {missing.name}", file=sys.stderr)
        return SKIPPED
    return 0


def measure(case: Case, report: Report, limit_s: float) -> dict[str, Any]:
    """How a case ended: its status done, skipped, failed or out of time, and why. What it
    printed is in OUT/logs."""
    log = report.folder / "logs" / f"{case.name.replace(' ', '-').replace('/', '-')}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with log.open("w") as file:
        asked = command(specification(report, case.place, case.options))
        process = subprocess.Popen(
            asked, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started, too
            process.wait()
    status = {None: "out of time", 0: "done", SKIPPED: "skipped"}.get(code, "failed")
    why = last_line(log.read_text(errors="replace")) if status in ("skipped", "failed") else ""
    if code is None:
        why = f"not done after {limit_s:.0f} s"
    return {
        "case": case.name,
        "status": status,
        "why": why,
        "seconds": round(time.monotonic() - started, 1),
    }


def play(
    part: int, cases: list[Case], given: argparse.Namespace, device: str | None
) -> list[dict[str, Any]]:
    """How each case ended, with its rows."""
    folder, minutes = Path(given.out), MINUTES[part] if given.minutes is None else given.minutes
    lines, deadline = folder / f"part{part}.jsonl", time.monotonic() + minutes * 60
    lines.unlink(missing_ok=True)
    ends = []
    with model_folder() as models:
        for case in cases:
            left_s = deadline - time.monotonic()
            if device is None:
                end = {
                    "case": case.name,
                    "status": "skipped",
                    "why": "no NVIDIA GPU that torch sees",
                    "seconds": 0,
                }
            elif left_s < LEAST_S:
                end = {
                    "case": case.name,
                    "status": "skipped",
                    "why": "no time left (--minutes)",
                    "seconds": 0,
                }
            else:
                report = Report(case.name, device, given.quick, folder, models, lines)
                end = measure(case, report, min(case.limit_s, left_s))
            with lines.open("a", encoding="utf-8") as file:
                file.write(json.dumps(end) + "\n")
            print(
                f"{case.name}: {end['status']} {end['why']} ({end['seconds']} s)",
                file=sys.stderr,
                flush=True,
            )
            ends.append({**end, "rows": rows_of(lines, case.name)})
    return ends


@contextlib.contextmanager
def model_folder() -> Iterator[Path]:
    """Where models of random weights lie while cases run, in memory where there is room for it."""
    shared = Path("/dev/shm")
    place = shared if shared.is_dir() and os.access(shared, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place, prefix="rlflow-gpu-") as folder:
        yield Path(folder)


def rows_of(lines: Path, case: str) -> list[dict[str, Any]]:
    found = (json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines())
    return [row for row in found if row["case"] == case and "what" in row]


def show(ends: list[dict[str, Any]]) -> None:
    """Prints the table; training with its share of the matrix rate."""
    rows = [row for end in ends for row in end["rows"]]
    rate = next((row["matrix_rate"] for row in rows if "matrix_rate" in row), None)
    for end in ends:
        for row in end["rows"]:
            print(
                f"{end['case'] + ': ' + row['what']:<72}{row['figure']:>12,.4g} {row['unit']}{remarks(row, rate)}"
            )
        if end["status"] != "done":
            print(f"{end['case']:<72}{'-':>12} {end['status']}: {end['why']}")


def remarks(row: dict[str, Any], rate: float | None) -> str:
    """What else a row of the table says; `utilization` becomes a field of it."""
    said = []
    if "ok" in row:
        said.append("right" if row["ok"] else f"WRONG (at most {row.get('limit', 1):g})")
    if row.get("flops_per_s"):
        said.append(f"{row['flops_per_s'] / 1e12:.1f} TFLOP/s")
        if rate:
            row["utilization"] = row["flops_per_s"] / rate
            said.append(f"{row['utilization']:.1%} of the matrix rate")
    said += [
        f"{name[:-4]} {row[name]:.1f} GiB"
        for name in ("peak_gib", "estimated_gib")
        if row.get(name)
    ]
    return f"  {', '.join(said)}" if said else ""


def device_name() -> str | None:
    """The GPU's name; None without one."""
    try:
        import torch
    except ImportError:
        return None
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", type=int, choices=MINUTES, help="which of the five calls")
    parser.add_argument("--quick", action="store_true", help="tiny shapes: does the script work?")
    parser.add_argument("--cpu", action="store_true", help="on the CPU, tiny shapes")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument(
        "--out", metavar="DIR", default="gpu", help="where figures and logs go (gpu)"
    )
    parser.add_argument("--wheels", metavar="DIR", help="packages to bring along")
    parser.add_argument(
        "--minutes", type=float, help="what has not begun by then is left out (8 or 9)"
    )
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        return one_case(given.case)
    if given.part is None:
        parser.error("--part 1, 2, 3, 4 or 5")
    given.quick |= given.cpu
    given.out = str(Path(given.out).absolute())
    Path(given.out).mkdir(parents=True, exist_ok=True)
    paths = [*bring(given.wheels, Path(given.out) / "packages"), str(ROOT)]
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [*paths, *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # cases end with it
    gpu = device_name()
    device = "cpu" if given.cpu else "cuda" if gpu else None
    named = platform.processor() or "CPU" if given.cpu else gpu
    started = time.monotonic()
    ends = play(
        given.part, [case for case in plan(given.part) if given.only in case.name], given, device
    )
    show(ends)
    wrong = [row["what"] for end in ends for row in end["rows"] if not row.get("ok", True)]
    failed = [end["case"] for end in ends if end["status"] in ("failed", "out of time")]
    print(
        f"{sum(end['status'] == 'done' for end in ends)} cases done, {len(wrong)} claims wrong, "
        f"failed: {failed or 'none'}"
    )
    found = {
        "benchmark": "gpu",
        "part": given.part,
        "gpu": named,
        "python": platform.python_version(),
        "wrong": wrong,
        "failed": failed,
        "results": ends,
        "seconds": round(time.monotonic() - started, 1),
    }
    print(json.dumps(found))
    return 1 if wrong or failed else 0


if __name__ == "__main__":
    sys.exit(main())
