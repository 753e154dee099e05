#!/usr/bin/env python
"""Eight GPUs for the first time: steps in order, up to the first surprise, and what to send us
then.

    python benchmarks/gpu/eight.py --model-3b DIR --model-7b DIR --train-data FILE --val-data FILE --corpus FILE

Doctor; all ranks over NCCL; the 3B recipe's dry run, and three steps of it with a look at every
GPU; a rank that is killed: the update after the resume against the uninterrupted one, without
Ray and vLLM, then a whole run that loses a rank; three steps of the 7B recipe (two GPUs for each
layer); twenty steps of 3B; twenty updates with a profiler on rank 0. About two hours."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 2.0
KILLED_RANK = "ray::TrainerRank"  # what the title of a rank's process begins with
SENT = ("*.txt", "*.jsonl", "profile/*", "*/metrics.jsonl", "*/config.yaml", "*/*.log")
STEP_METRICS = (
    "time/rollout_s",
    "time/score_s",
    "time/update_s",
    "time/sync_s",
    "time/step_s",
    "memory/update_gib",
    "train/gradient_norm",
    "train/logprob_gap",
)


@dataclass(frozen=True)
class Step:
    """A command and what is expected of it. check: says what is surprising about the folder and
    what the command printed; "": nothing. during: called every two seconds with the command's
    process id. fails: it has to end with an error."""

    name: str
    command: Sequence[str]
    limit_s: float
    check: Callable[[Path, str], str] = lambda folder, said: ""
    during: Callable[[Path, int], None] = lambda folder, process: None
    fails: bool = False


def play(steps: Sequence[Step], folder: Path, first: int = 1, poll_s: float = POLL_S) -> int:
    """Runs the steps from the `first` on; after a surprise says what to send, and returns 1."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, step in enumerate(steps[first - 1 :], first):
        print(f"{number}/{len(steps)} {step.name} ...", flush=True)
        started = time.monotonic()
        surprise = surprise_of(step, folder, poll_s)
        if surprise:
            print(f"SURPRISE at '{step.name}': {surprise}")
            print(
                f"Please send us {packed(folder)} and that line. Once it is mended, go on with "
                f"--from {number}"
            )
            return 1
        print(f"   as expected, {time.monotonic() - started:.0f} s", flush=True)
    print(
        f"All {len(steps)} steps went as expected. Please send us {packed(folder)}: it holds the "
        "figures."
    )
    return 0


def surprise_of(step: Step, folder: Path, poll_s: float) -> str:
    """What was not as expected; "" where all was. What the command prints is in the folder."""
    log = folder / f"{step.name.replace(' ', '-')}.txt"
    with log.open("w") as file:
        process = subprocess.Popen(
            step.command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, cwd=ROOT
        )
        deadline = time.monotonic() + step.limit_s
        try:
            while process.poll() is None and time.monotonic() < deadline:
                step.during(folder, process.pid)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(poll_s)
        finally:
            ended = process.poll()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    said = log.read_text(errors="replace")
    last = next(
        (line for line in reversed(said.splitlines()) if line.strip()), "it printed nothing"
    )
    if ended is None:
        return f"not done after {step.limit_s:.0f} s; it said at last: {last}"
    if (ended != 0) != step.fails:
        expected = "an error" if step.fails else "0"
        return f"exit code {ended}, expected {expected}; it said at last: {last}"
    return step.check(folder, said)


def packed(folder: Path) -> Path:
    """An archive with logs, figures and configurations: no weights, no data."""
    archive = folder / "send.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for file in sorted({file for pattern in SENT for file in folder.glob(pattern)}):
            tar.add(file, file.relative_to(folder))
    return archive


# ---------------------------------------------------------------- what is looked at


def watch_gpus(folder: Path, process: int) -> None:
    """Notes which processes are on which GPU."""
    asked = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader"]
    said = subprocess.run(asked, capture_output=True, text=True, timeout=60).stdout
    with (folder / "gpus.jsonl").open("a") as file:
        file.write(json.dumps({"process": process, "lines": said.strip().splitlines()}) + "\n")


def pinned(folder: Path, gpus: int) -> str:
    """Whether at some time each GPU had two processes, its rank and its engine, and never more."""
    looks = [json.loads(line) for line in (folder / "gpus.jsonl").read_text().splitlines()]
    seen = [
        look["lines"] for look in looks if look["process"] == looks[-1]["process"]
    ]  # of this attempt
    most: dict[str, int] = {}
    for lines in seen:
        for gpu in sorted({line.split(",")[0] for line in lines}):
            most[gpu] = max(most.get(gpu, 0), sum(line.startswith(gpu) for line in lines))
    if sorted(most.values()) != [2] * gpus:
        return (
            f"processes on each GPU at the most {most}, expected 2 on each of {gpus}: a rank and an "
            "engine (gpus.jsonl)"
        )
    return ""


def steps_done(folder: Path, run: str, steps: int) -> str:
    """Whether a run has so many steps with time, memory and finite figures."""
    lines = [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "train/gradient_norm" in line]
    if len(trained) < steps:
        return f"{run}/metrics.jsonl has {len(trained)} training steps, expected {steps}"
    for name in STEP_METRICS:
        values = [line.get(name) for line in trained]
        if not all(isinstance(value, (int, float)) and value == value for value in values):
            return f"{run}/metrics.jsonl: {name} is {values}"
    return ""


def same_updates(folder: Path) -> str:
    """Whether the updates after the resume are those of the uninterrupted run, and the policies
    at their end."""
    import torch

    whole, resumed = (read_updates(folder / f"{name}.jsonl") for name in ("whole", "resumed"))
    for number, line in resumed.items():
        for name in ("loss", "gradient_norm"):
            one, other = line[name], whole[number][name]
            if abs(one - other) > 1e-3 * max(abs(other), 1e-3):
                return f"update {number}: {name} {one} after the resume, {other} without one"
    gap = (torch.load(folder / "resumed.pt") - torch.load(folder / "whole.pt")).abs().max().item()
    return (
        ""
        if resumed and gap < 1e-2
        else f"log-probs after {len(resumed)} resumed updates differ by up to {gap} nats"
    )


def read_updates(file: Path) -> dict[int, dict[str, float]]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return {line["update"]: line for line in lines}


def kill_a_rank(folder: Path, process: int, run: str = "lost") -> None:
    """Ends one rank of the run once it has written a checkpoint."""
    if any((folder / run / "checkpoints").glob("*")):
        time.sleep(POLL_S)
        for child in psutil.Process(process).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if " ".join(child.cmdline()).startswith(KILLED_RANK):
                    child.kill()
                    return


# ---------------------------------------------------------------- the list


def the_list(given: argparse.Namespace) -> list[Step]:
    """The steps, in order."""
    out, gpus = Path(given.out).absolute(), given.gpus
    recipes = ROOT / "recipes" / "searchr1"
    data = [
        "--train-data",
        given.train_data,
        "--val-data",
        given.val_data,
        "--corpus",
        given.corpus,
    ]
    size = [
        f"cluster.ranks={gpus}",
        f"rollout.engine.engines={gpus}",
        "evaluation.every_steps=0",
        "evaluation.at_start=false",
        "checkpoint.export=false",
    ]

    def train(run: str, recipe: str, model: str, *more: str) -> list[str]:
        config = ["--config", str(recipes / "config" / f"{recipe}.yaml"), "--model", model]
        return [
            "bash",
            str(recipes / "run_train.sh"),
            *config,
            *data,
            *size,
            f"run.directory={out / run}",
            *more,
        ]

    def updates(name: str, *more: str) -> list[str]:
        config = [
            "--config",
            str(recipes / "config" / "qwen2.5_3b.yaml"),
            "--override",
            f"model.path={given.model_3b}",
        ]
        kept = "checkpoint" if name in ("killed", "resumed") else f"checkpoint-{name}"
        files = ["--checkpoint", str(out / kept), "--out", str(out / f"{name}.jsonl")]
        return [*torchrun, "updates", *config, *files, *more]

    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(gpus),
        str(ROOT / "benchmarks" / "gpu" / "ranks.py"),
    ]
    recipe = ("qwen2.5_3b", given.model_3b)
    return [
        Step("doctor", [sys.executable, "-m", "rlflow", "doctor"], 120),
        Step("nvidia-smi", ["nvidia-smi", "-q", "-d", "MEMORY,POWER,CLOCK"], 60),
        Step("ranks over NCCL", [*torchrun, "smoke"], 180),
        Step("dry run 3B", train("dry", *recipe, "--dry-run"), 300),
        Step(
            "three steps 3B",
            train("three", *recipe, "run.steps=3"),
            1800,
            lambda folder, said: pinned(folder, gpus) or steps_done(folder, "three", 3),
            watch_gpus,
        ),
        Step("updates uninterrupted", updates("whole", "--save-after", "2"), 600),
        Step(
            "updates killed",
            updates("killed", "--save-after", "2", "--die-before", "3"),
            600,
            fails=True,
        ),
        Step(
            "updates resumed",
            updates("resumed", "--resume"),
            600,
            lambda folder, said: same_updates(folder),
        ),
        Step(
            "run that loses a rank",
            train("lost", *recipe, "run.steps=3", "checkpoint.every_steps=1"),
            1800,
            during=kill_a_rank,
            fails=True,
        ),
        Step(
            "run resumed",
            train("lost", *recipe, "run.steps=3", "checkpoint.every_steps=1", "--resume"),
            1800,
            lambda folder, said: steps_done(folder, "lost", 3),
        ),
        Step(
            "three steps 7B",
            train("seven", "qwen2.5_7b", given.model_7b, "run.steps=3"),
            2400,
            lambda folder, said: steps_done(folder, "seven", 3),
        ),
        Step(
            "twenty steps 3B",
            train("twenty", *recipe, "run.steps=20"),
            3600,
            lambda folder, said: steps_done(folder, "twenty", 20),
        ),
        Step(
            "profile",
            updates("profiled", "--updates", "20", "--profile", str(out / "profile")),
            900,
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("--model-3b", "--model-7b", "--train-data", "--val-data", "--corpus"):
        parser.add_argument(name, required=True)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--out", metavar="DIR", default="eight")
    parser.add_argument(
        "--from",
        dest="first",
        type=int,
        default=1,
        metavar="STEP",
        help="leave out the steps before this one",
    )
    given = parser.parse_args()
    return play(the_list(given), Path(given.out).absolute(), given.first)


if __name__ == "__main__":
    sys.exit(main())
