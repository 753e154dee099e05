"""What kills, hangs and cut cables cost an asynchronous run with rollout workers: its files must prove that it is time alone.

    python benchmarks/chaos.py --ranks 2                   # 30 minutes: half of them the game, half the demo of Search-R1
    python benchmarks/chaos.py --ranks 2 --task search     # 30 minutes of all that there is, retrieval included
    python benchmarks/chaos.py --cuts                      # on two machines of a Ray cluster, in network namespaces (root)
    python benchmarks/chaos.py --minutes 2 --task game
    python benchmarks/chaos.py --quick                     # the machinery, in less than a minute

Two tasks. A tiny model plays a game of one to six turns, whose lengths no policy decides; and the demo searches, with a retrieval
service that the run manages. In both some answers of the environment are slow and few never come, and the environment has a
process of its own. Meanwhile, at random: kill -9 and SIGSTOP of rollout workers, trainer ranks and the retrieval service, kill -9
of the environment's processes and of vLLM's engine, SIGSTOP of the driver for some seconds, and of it or of everything for longer
than an episode may last, an outage of all tools, slow peers on the run's ports, a second run that takes the directory while the
first is stopped, kill -9 of the driver alone and of everything, which `--resume` then continues, and cuts of the cable between
two machines. Afterwards the last checkpoint is held against what every step wrote, and both against witnesses of which the run
knows nothing (`chaos_witness.py`): each accepted attempt trained exactly once, no task skipped, the bound of the staleness held,
nothing written by a run that lost its directory, no process left. A calm run of the same seed says what there was to reach: the
turns of the game's episodes have its distribution by a two-sample Kolmogorov-Smirnov test (what is lost must not be the long
ones), and the demo comes to its exact match within sampling error. Ends with 1 where anything of that fails; the last line is
JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from chaos_harms import (
    CABLE,
    HARMS,
    Harm,
    command_of,
    crowd,
    last_words,
    processes_left,
    suspend,
)
from chaos_runs import LIMITS_S, OUT, compared, witnesses, write_run
from chaos_witness import FOLDER, SESSION

from rlflow.report.sinks import read_metrics
from rlflow.run.directory import RunDirectory

if TYPE_CHECKING:
    from tests.machines import Machines

PEACE_S = 600.0
"""In which the run comes to its end when nobody hurts it any more."""
AWARE = ("this run ends and writes nothing more", "is writing to")
"""What a run says whose directory is another's: one that had it, and one that was still starting."""
LAST_STEPS = 4
"""In peace, when the time of a run without `--steps` is over."""
CALM_STEPS = {"game": 60, "search": 10}
"""Of the calm run at most: by then the demo has learned what it can."""


@dataclass
class Chaos:
    """Starts the run, hurts it until the time is over, and lets it come to an end."""

    config: Path
    run: RunDirectory
    draw: random.Random
    harms: dict[str, Harm]
    steps: int | None = None  # None: as many as the time allows
    limit_s: float = 24.0  # of an episode
    machines: Machines | None = None
    cpus: tuple[int, int] = (0, 0)  # of the machines
    done: Counter[str] = field(default_factory=Counter)
    process: subprocess.Popen[bytes] | None = None
    nodes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    drivers: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)  # of the drivers that did not come to the run's
    robbed: list[tuple[subprocess.Popen[bytes], Path]] = field(default_factory=list)
    """Runs whose directory another one has, and their logs."""
    said: Counter[str] = field(default_factory=Counter)
    """By the robbed: that their directory is lost, or another error."""
    log: Path = Path()  # of the session that was started last

    def start(self) -> None:
        """The run, or its continuation, in a session of its own."""
        from tests.machines import CLEAN

        command = [
            sys.executable,
            "-m",
            "rlflow",
            "train",
            "--config",
            str(self.config),
            "--resume",
        ]
        command.append(f"run.steps={self.steps or 1_000_000}")
        if self.machines is not None:
            for machine, cpus in enumerate(
                self.cpus
            ):  # who was cut off for too long is not let in again by Ray
                if machine not in self.nodes or self.nodes[machine].poll() is not None:
                    self.nodes[machine] = self.machines.start_ray(machine, cpus)
            command = self.machines.command(
                0, [*command, f"cluster.address={self.machines.cluster}"]
            )
        folder = witnesses(self.run)
        folder.mkdir(exist_ok=True)
        told = {FOLDER: str(folder), SESSION: str(len(self.drivers))}
        self.log = self.run.path.parent / f"chaos.{len(self.drivers)}.log"
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **CLEAN, **told},
            )
        self.drivers.append(self.process.pid)

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def hurt(self) -> None:
        """One of the harms, where somebody is there to be hurt."""
        name = self.draw.choices(list(self.harms), [harm.share for harm in self.harms.values()])[0]
        harm, pause_s = self.harms[name], self.draw.uniform(0.2, 1.0)
        assert self.process is not None
        if self.step() == 0:
            return
        if harm.victim == CABLE:
            assert self.machines is not None and harm.seconds is not None
            self.machines.cut()
            time.sleep(pause_s * harm.seconds)
            self.machines.mend()
        elif name == "driver suspended":
            suspend(psutil.Process(self.process.pid), self.draw.random() < 0.5, self.limit_s + 3.0)
        elif name == "peers slow":
            services = self.processes("rlflow_environments.retrieval")
            crowd([psutil.Process(self.process.pid), *services], pause_s * (harm.seconds or 0.0))
        elif name == "tools out":
            self.take_tools(pause_s * (harm.seconds or 0.0))
        elif name == "directory stolen":
            if not self.steal():
                return
        elif name == "driver killed" and self.draw.random() < 0.5:
            os.killpg(self.process.pid, signal.SIGKILL)
        else:
            victims = (
                [psutil.Process(self.process.pid)]
                if harm.victim is None
                else self.processes(harm.victim)
            )
            if not victims:
                return
            victim = self.draw.choice(victims)
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.send_signal(harm.signal)
                if harm.seconds is not None:
                    time.sleep(pause_s * harm.seconds)
                    victim.send_signal(signal.SIGCONT)
        self.done[name] += 1

    def take_tools(self, seconds: float) -> None:
        """No tool works for so long: the run may end with that as its error."""
        out = witnesses(self.run) / OUT
        out.touch()
        time.sleep(seconds)
        out.unlink()

    def steal(self) -> bool:
        """Another run takes the directory while the first one is stopped and its lock is gone, as
        on a file system without locks; then the first one goes on. Of no effect, and False, where
        the first one does not have the directory yet."""
        first, log, lock = self.process, self.log, self.run.path / "run.lock"
        assert first is not None
        os.kill(first.pid, signal.SIGSTOP)
        if not lock.is_file() or str(first.pid) not in lock.read_text():
            os.kill(first.pid, signal.SIGCONT)  # still starting: it may get the directory later
            return False
        lock.unlink(missing_ok=True)
        self.start()
        until = time.monotonic() + PEACE_S
        while (
            self.alive() and not (lock.is_file() and lock.read_text()) and time.monotonic() < until
        ):
            time.sleep(0.2)
        os.kill(first.pid, signal.SIGCONT)
        self.robbed.append((first, log))
        return True

    def processes(self, name: str = "") -> list[psutil.Process]:
        """The processes of the run that have the name in their command line."""
        found: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            assert self.process is not None
            found = psutil.Process(self.process.pid).children(recursive=True)
        if self.machines is not None:
            found = self.machines.processes(0) + self.machines.processes(1)
        return [process for process in found if name in command_of(process)]

    def step(self) -> int:
        records = read_metrics(self.run.metrics) if self.run.metrics.is_file() else []
        return int(records[-1]["step"]) if records else 0

    def play(self, seconds: float, every_s: float) -> None:
        """Hurts the run for so long; a driver that ended, by a kill or by its own error, is started again."""
        until, limit = float("inf"), time.monotonic() + 2 * seconds + PEACE_S
        self.start()
        shown = 0.0
        while time.monotonic() < limit:
            time.sleep(self.draw.uniform(0.3, 1.7) * every_s)
            if until == float("inf") and self.step() > 0:
                until = time.monotonic() + seconds  # what starts is not counted
            if not self.alive():
                if self.run.summary.is_file() and self.steps is not None:
                    break
                if time.monotonic() > until:
                    self.steps = self.steps or self.step() + LAST_STEPS
                    self.run.summary.unlink(missing_ok=True)  # of the end that it was asked for
                self.ends.append(last_words(self.process, self.log))
                self.start()
            elif time.monotonic() < until:
                self.hurt()
            elif self.steps is None:
                os.kill(self.process.pid, signal.SIGTERM)  # saves, and goes on with the last steps
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(PEACE_S)
            if time.monotonic() - shown > 20:
                shown = time.monotonic()
                end = f", last ended by {self.ends[-1][:160]}" if self.ends else ""
                print(
                    f"step {self.step()}, {dict(self.done)}, {len(self.drivers)} sessions{end}",
                    flush=True,
                )

    def end(self) -> None:
        """Ends the run and its processes, where any is left."""
        for process in (self.process, *(first for first, _ in self.robbed)):
            if process is not None and process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def unaware(self, within_s: float = PEACE_S) -> list[str]:
        """What is wrong with the ends of the runs that lost their directory: each ends by itself
        with an error, that the directory is lost or what else it met (tools that were out, a rank
        that had died). That it wrote nothing, the witnesses say."""
        until = time.monotonic() + within_s
        while any(one.poll() is None for one, _ in self.robbed) and time.monotonic() < until:
            time.sleep(0.5)
        problems = []
        for one, log in self.robbed:
            code, said = one.poll(), last_words(one, log)
            self.said["directory" if any(words in said for words in AWARE) else "another"] += 1
            if code is None or code <= 0 or not said.startswith("rlflow: "):
                problems.append(f"a run whose directory was stolen ended with {code}: {said}")
                print("\n".join(log.read_text(errors="replace").splitlines()[-40:]), flush=True)
        return problems


def play(task: str, minutes: float, args: argparse.Namespace) -> dict[str, Any]:
    """What came of both runs of a task; their files are kept where there are problems."""
    folder = Path(tempfile.mkdtemp(prefix="rlflow-chaos-"))
    told = play_in(folder, task, minutes, args)
    if told["problems"]:
        told["files"] = str(folder)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return told


def play_in(folder: Path, task: str, minutes: float, args: argparse.Namespace) -> dict[str, Any]:
    """Both runs of a task; what came of them, or `problems` alone where the run did not come to its end."""
    from tests.machines import Machines

    calm_steps = args.steps or min(
        CALM_STEPS[task], max(10, round((60 if task == "game" else 4) * minutes))
    )
    there = {"rank": bool(args.ranks), "retrieval": task == "search", "cable": args.cuts, "engine": args.engine != "embedded",
             "directory": not args.cuts, "peers": not args.cuts}  # fmt: skip
    names = [name for name in args.only or HARMS if there.get(name.split()[0], True)]
    harms = {name: HARMS[name] for name in names}
    with contextlib.ExitStack() as stack:
        calm, calm_run = write_run(folder, "calm", calm_steps, workers=0, ranks=0, task=task)
        command = [sys.executable, "-m", "rlflow", "train", "--config", str(calm)]
        witnesses(calm_run).mkdir(parents=True)
        quiet = {**os.environ, "CHAOS_CALM": "1", FOLDER: str(witnesses(calm_run))}
        subprocess.run(command, check=True, env=quiet, stdout=subprocess.DEVNULL)
        config, run = write_run(
            folder, "hurt", calm_steps, args.workers, args.ranks, task, args.engine
        )
        run.path.mkdir(parents=True)
        chaos = Chaos(config, run, random.Random(args.seed), harms, args.steps, LIMITS_S[task])
        if args.cuts:
            chaos.machines, chaos.cpus = Machines(), (args.ranks + 1, max(1, args.workers - 1))
            stack.callback(chaos.machines.close)
        try:
            chaos.play(60 * minutes, args.every)
            unaware = chaos.unaware()
        finally:
            chaos.end()
        told = {
            "task": task,
            "engine": args.engine,
            "steps": chaos.steps,
            "sessions": len(chaos.drivers),
            "done": dict(chaos.done),
            "stolen_said": dict(chaos.said),
        }
        if not run.summary.is_file():
            log = chaos.log.read_text(errors="replace").splitlines()
            print("\n".join(log[-30:]))
            return {
                **told,
                "problems": [
                    f"the run did not come to its end: step {chaos.step()} of {chaos.steps}"
                ],
            }
        told |= dict(compared(task, run, calm_run, chaos.steps or 0))
        told["problems"] += unaware
        if not chaos.done:
            told["problems"].append(
                "nothing was hurt: the run ended too soon; give it more --steps"
            )
        told["problems"] += [
            f"a process is left: {command}" for command in processes_left(chaos.drivers)
        ]
        return told


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=30.0,
        help="of harm, of all tasks (default 30); a run then comes to its end in peace",
    )
    parser.add_argument("--task", choices=["game", "search"], nargs="+", default=["game", "search"])
    parser.add_argument(
        "--engine",
        default="embedded",
        help="of the workers: embedded (default) or vllm (RLFLOW_VLLM_PYTHON)",
    )
    parser.add_argument(
        "--steps", type=int, help="of a run (default: as many as the minutes allow)"
    )
    seconds = "seconds between two harms, about (default 4)"
    parser.add_argument("--every", type=float, default=4.0, metavar="S", help=seconds)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--ranks",
        type=int,
        default=0,
        help="trainer ranks, hurt as well (default 0: in the driver)",
    )
    parser.add_argument(
        "--cuts", action="store_true", help="on two machines, whose cable is cut for up to 12 s"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", nargs="+", choices=list(HARMS), metavar="HARM", help="these harms"
    )
    parser.add_argument("--quick", action="store_true", help="a quarter of a minute of the game")
    args = parser.parse_args(arguments)
    if args.quick:
        args.minutes, args.task, args.every = 0.25, ["game"], min(args.every, 2.0)
    from tests.machines import refusal

    if args.cuts and (told := refusal()):
        print(f"skipped: --cuts {told}")
        return 0
    found = []
    for task in args.task:
        found.append(play(task, args.minutes / len(args.task), args))
        for key, value in found[-1].items():
            print(f"{key:22}{value}", flush=True)
    print(
        json.dumps(
            {"benchmark": "chaos", "tasks": found, "load": os.getloadavg(), "cores": os.cpu_count()}
        )
    )
    return int(any(one["problems"] for one in found))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
