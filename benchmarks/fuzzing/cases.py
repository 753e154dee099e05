"""A case of the fuzz run: a command in a process of its own, and what may not happen in it."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import yaml

STACKS_S = 5.0  # for a process that hangs to write where
MOST_MIB = 1024  # that a case of a few kilobytes may take beyond what it was forked with
NOISE = (
    "Traceback (most recent call last)",
    "Exception ignored in",
    "never retrieved",
    "Fatal Python error",
    "core dumped",
)
ONE_LINE = re.compile(r"^(?:rlflow: (?:\w+: |interrupted)|ckpt_convert: |usage: )", re.MULTILINE)


class Wrong(Exception):
    """What a case found: the text says it."""


@dataclass(frozen=True)
class Ended:
    """How a forked process ended. code: its exit status, the negative number of the signal that ended it, None where it had to be
    killed at its deadline. extra_mib: its highest resident set beyond that of the process it was forked from."""

    code: int | None
    out: str
    err: str
    seconds: float
    extra_mib: float

    def check(self, codes: Collection[int] = (0, 2)) -> bool:
        """Whether it did what it was asked for, and did not refuse. Raises Wrong for a hang, a crash, a traceback, another exit
        code than `codes`, an error without its one line, too much memory."""
        if self.code is None:
            raise Wrong(f"no end after {self.seconds:.0f} s: {self.err[-1500:]}")
        noise = [word for word in NOISE if word in self.err]
        if noise or self.code not in codes:
            raise Wrong(f"exit {self.code} {noise}: {self.err[-1500:]}")
        if self.code and not ONE_LINE.search(self.err):
            raise Wrong(f"exit {self.code} without a line that says why: {self.err[-2000:]!r}")
        if self.extra_mib > MOST_MIB:
            raise Wrong(f"{self.extra_mib:.0f} MiB for one small case")
        return self.code == 0


def trained(values: dict[str, Any], folder: Path, deadline_s: float, *flags: str) -> Ended:
    """How `rlflow train` ended over a configuration, which is written into the folder."""
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(values), encoding="utf-8")
    return forked(command(["train", "--config", str(config), *flags]), folder, deadline_s)


def forked(work: Callable[[], int], folder: Path, deadline_s: float) -> Ended:
    """Runs `work` in a fork, whose process group is killed in the end; at the deadline its stacks are in `err`."""
    started, before = time.monotonic(), _resident_mib()
    sys.stdout.flush()
    sys.stderr.flush()
    out, err = folder / "stdout", folder / "stderr"
    child = os.fork()
    if not child:
        _play(work, out, err)
    ended, late = None, False
    try:
        ended = _ended_within(child, deadline_s)
        late = ended is None
        if late:
            os.kill(child, signal.SIGABRT)
            ended = _ended_within(child, STACKS_S)
    finally:  # also where the user wants out
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    status, usage = ended or os.wait4(child, 0)[1:]
    return Ended(
        None if late else os.waitstatus_to_exitcode(status),
        out.read_text(encoding="utf-8", errors="replace") if out.is_file() else "",
        err.read_text(encoding="utf-8", errors="replace") if err.is_file() else "",
        time.monotonic() - started,
        max(0.0, usage.ru_maxrss / 1024 - before),
    )


def _ended_within(child: int, seconds: float) -> tuple[int, resource.struct_rusage] | None:
    """Status and usage of a child that ends by then."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            return status, usage
        time.sleep(0.005)
    return None


def command(arguments: list[str]) -> Callable[[], int]:
    """One call of the command line of rlflow."""

    def call() -> int:
        from rlflow.commands.cli import main

        try:
            return main(arguments)
        except SystemExit as stop:  # argparse's way to refuse
            return stop.code if isinstance(stop.code, int) else 1

    return call


def _play(work: Callable[[], int], out: Path, err: Path) -> None:
    """A child's whole life."""
    os.setpgid(0, 0)
    for path, number in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), number)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace")  # as Python's own
    faulthandler.enable(sys.stderr)
    code = 1
    try:
        code = work()
    except BaseException:  # noqa: BLE001 -- whatever escapes from a command is what is looked for
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _resident_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


class Target(Protocol):
    """Something that is given nonsense."""

    def prepare(self, folder: Path) -> None:
        """Makes what the cases start from."""

    def case(self, draw: random.Random, folder: Path) -> bool:
        """Plays one case in an empty folder; whether it was accepted. Raises Wrong."""

    def close(self) -> dict[str, float]:
        """Ends what still runs; returns further figures. Raises Wrong."""


@dataclass
class Report:
    """What came of one target's cases. slowest_s: the longest case."""

    cases: int = 0
    accepted: int = 0
    slowest_s: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def play(
    name: str, target: Target, seed: int, folder: Path, seconds: float, only: int | None = None
) -> Report:
    """Cases 0, 1, ... of a target for so many seconds, or `only` that one; each draws from (seed, name, number) alone."""
    report = Report()
    (folder / "base").mkdir(parents=True)
    target.prepare(folder / "base")
    end = time.monotonic() + seconds
    number = 0 if only is None else only
    while time.monotonic() < end:
        place = folder / f"case_{number}"
        place.mkdir()
        started = time.monotonic()
        try:
            report.accepted += target.case(random.Random(f"{seed}/{name}/{number}"), place)
            shutil.rmtree(place, ignore_errors=True)
        except Wrong as found:
            report.wrong.append(f"--only {name} --seed {seed} --case {number}: {found}")
            print(report.wrong[-1], file=sys.stderr, flush=True)
        report.cases += 1
        report.slowest_s = max(report.slowest_s, time.monotonic() - started)
        number += 1
        if only is not None:
            break
    try:
        report.figures = target.close()
    except Wrong as found:
        report.wrong.append(f"{name}: {found}")
        print(report.wrong[-1], file=sys.stderr, flush=True)
    return report
