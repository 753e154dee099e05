"""A run on four machines: the driver and retrieval on one, a rollout worker on another, a trainer rank on each of two.

    python benchmarks/hosts.py              # six minutes; needs root and iproute2
    python benchmarks/hosts.py --quick      # the calm part alone: two minutes, as Ray starts on four machines

The machines are network namespaces of this one, each with its address, host name and shared memory (tests/machines.py), joined by
a switch; processes reach each other through it alone. Tensor parallelism crosses it in every layer. The demo of Search-R1 trains
there, asynchronously. Then, one after the other: the cable of the worker's machine is pulled for 20 s, the machine loses its power
and comes back, the cable of a rank's machine is pulled, and that machine loses its power. What ends the run is told, and `--resume`
goes on. Afterwards every step's files and the last checkpoint must prove that each attempt was trained once and
no group was lost. Ends with 1 where they do not; the last line is JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import psutil
from chaos_runs import AHEAD, ROOT, STALENESS, problems_of

from rlflow.config.loading import config_text
from rlflow.config.schema import load_config
from rlflow.report.sinks import read_metrics
from rlflow.run.directory import RunDirectory
from rlflow_environments.search.sources import world_files

if TYPE_CHECKING:
    from tests.machines import Machines

DRIVER, WORKER, RANK, OTHER_RANK = range(4)
"""The machines. Retrieval is served from the driver's, which has no core for Ray."""
CUT_S = 20.0
"""Twice as long as a worker may be silent; Ray itself gives a machine up later."""
LIMIT_S = 240.0  # for the next steps, on a busy machine
PLACES_S = 30.0  # in which the ranks' places are reserved
PORT = 8000


class Hosts:
    """The run and its machines, in a folder."""

    def __init__(self, machines: Machines, folder: Path) -> None:
        self.machines = machines
        self.run = RunDirectory(folder / "run")
        self.run.path.mkdir()  # --resume begins a run where its directory is there
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self._log = folder / "log.txt"
        self._config = folder / "hosts.yaml"
        self._files = world_files({"directory": str(folder / "world"), "seed": 7})
        self._config.write_text(self._text(), encoding="utf-8")

    def _text(self) -> str:
        """The demo's configuration, on these machines."""
        search = f"{{name: http, url: 'http://{self.machines.addresses[DRIVER]}:{PORT}'}}"
        values = [
            f"run.directory={self.run.path}", "run.steps=100000", f"environment.retriever={search}",
            f"environment.world.directory={self._files['corpus'].parent}",
            "cluster.ranks=2", "trainer.tensor_parallel=2", "cluster.rollout_workers=1",
            f"cluster.address={self.machines.cluster}", "rollout.prompts_per_step=8",
            "rollout.samples_per_prompt=4", "rollout.faults={call_s: 20, episode_s: 60, max_aborted_share: 0.9}",
            f"rollout.asynchronous={{max_staleness: {STALENESS}, run_ahead: {AHEAD}}}",
            "evaluation.every_steps=0", "evaluation.at_start=false", "evaluation.final_questions=8",
            "checkpoint.every_steps=4", "checkpoint.export=false", "metrics.picture=false",
            "metrics.progress=none", "metrics.trajectories_per_step=1000000",
        ]  # fmt: skip
        config = load_config(ROOT / "recipes" / "searchr1" / "config" / "short.yaml", values)
        return config_text(config)

    def serve(self) -> None:
        """Starts retrieval on the driver's machine."""
        corpus = ["--corpus", str(self._files["corpus"]), "--retriever", "bm25"]
        address = ["--host", self.machines.addresses[DRIVER], "--port", str(PORT)]
        self._start(
            DRIVER, ["search", "serve", *corpus, *address], self._log.with_name("serve.txt")
        )

    def train(self) -> None:
        """Ray where it does not run, then the run, or its continuation. The ranks take the cores
        that there are, and the worker, which waits for 120 s, that of the machine that joins."""
        for machine in (DRIVER, RANK, OTHER_RANK):
            self.start_ray(machine)
        command = ["train", "--config", str(self._config), "--resume"]
        self.process = self._start(DRIVER, command, self._log)
        time.sleep(PLACES_S)
        self.start_ray(WORKER)
        for machine in (RANK, OTHER_RANK):
            self.wait_for(lambda machine=machine: self.has(machine, "TrainerRank"), "a rank")

    def start_ray(self, machine: int) -> None:
        if machine not in self.nodes or self.nodes[machine].poll() is not None:
            cpus = 0 if machine == DRIVER else 1
            self.nodes[machine] = self.machines.start_ray(machine, cpus)

    def lose_power(self, machine: int) -> None:
        """All that Ray runs there is gone at once."""
        self.machines.end_ray(self.nodes[machine], signal.SIGKILL)

    def _start(self, machine: int, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        from tests.machines import CLEAN

        rlflow = [sys.executable, "-m", "rlflow", *command]
        with open(log, "ab") as output:
            return subprocess.Popen(
                self.machines.command(machine, rlflow),
                env={**os.environ, **CLEAN},
                stdout=output,
                stderr=output,
            )

    def has(self, machine: int, actor: str) -> bool:
        """Whether a process of that name runs on the machine."""
        for process in self.machines.processes(machine):
            with contextlib.suppress(psutil.Error):  # it has just ended
                if actor in " ".join(process.cmdline()):
                    return True
        return False

    @property
    def step(self) -> int:
        return self.steps[-1] if self.steps else 0

    @property
    def steps(self) -> list[int]:
        records = read_metrics(self.run.metrics) if self.run.metrics.is_file() else []
        return [int(record["step"]) for record in records]

    def wait_for(self, met: Callable[[], object], what: str) -> float:
        """Seconds until then. Raises where the run ends before, or it takes too long."""
        begun = time.monotonic()
        while not met():
            assert self.process is None or self.process.poll() is None, self.last_words()
            waited = time.monotonic() - begun
            assert waited < LIMIT_S, f"{what}: not within {LIMIT_S:.0f} s\n{self.last_words()}"
            time.sleep(0.1)
        return time.monotonic() - begun

    def goes_on(self, what: str, steps: int = 3) -> float:
        """Seconds until the run has made so many more steps."""
        first = self.step
        return self.wait_for(lambda: self.step >= first + steps, f"{steps} steps {what}")

    def cut(self, machine: int) -> dict[str, Any]:
        """Pulls the machine's cable for a while; what came of it. A run that it ends is resumed."""
        before = self.step
        self.machines.cut(machine)
        time.sleep(CUT_S)
        self.machines.mend(machine)
        begun = time.monotonic()
        while self.alive and self.step == before and time.monotonic() - begun < LIMIT_S:
            time.sleep(0.1)
        if self.alive:
            return {"next_step_s": self.goes_on("after the cable was mended", 1)}
        return self.resume(before)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def resume(self, before: int) -> dict[str, Any]:
        """What a run that ended at step `before` said and lost, and the seconds to its next step."""
        assert self.process is not None
        status = self.process.wait(LIMIT_S)
        said = self.last_words().strip().splitlines()
        saved = self.run.saved.latest()
        # Ranks take their places before the worker does
        self.lose_power(WORKER)
        begun = time.monotonic()
        self.train()
        self.goes_on("after the run was resumed", 1)
        return {
            "exit_status": status,
            "said": [line for line in said if "Error" in line or "Died" in line][-1:],
            "steps_lost": before - (saved[0] if saved else 0),
            "resumed_s": time.monotonic() - begun,
        }

    def end(self) -> int:
        """Ends the run as Ctrl-C does; its exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(120)
        finally:
            self.process.kill()

    def last_words(self) -> str:
        return self._log.read_text(errors="replace")[-3000:] if self._log.is_file() else ""


@contextlib.contextmanager
def hosts() -> Iterator[Hosts]:
    """Four machines and a run that is not started; everything is gone afterwards."""
    from tests.machines import Machines

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        machines = Machines(4)
        stack.callback(machines.close)
        yield Hosts(machines, folder)


def play(harm: bool) -> dict[str, Any]:
    """What the run cost on four machines; with `harm`, what each harm cost beside it."""
    with hosts() as here:
        here.serve()
        begun = time.monotonic()
        here.train()
        here.wait_for(lambda: here.step >= 2, "two steps")
        figures: dict[str, Any] = {"start_s": time.monotonic() - begun}
        figures["step_s"] = here.goes_on("on four machines", steps=5) / 5
        if harm:
            figures |= hurt(here)
        figures["exit_status"] = here.end()
        figures["steps"] = here.step
        figures["problems"] = list(problems_of(here.run, here.step))
        if figures["exit_status"] != 130:
            figures["problems"].append(f"the run ended with {figures['exit_status']}")
        records = read_metrics(here.run.metrics)
        times = [record["time/step_s"] for record in records if "time/step_s" in record]
        figures["step_median_s"] = median(times) if times else None
        return figures


def hurt(here: Hosts) -> dict[str, Any]:
    """What each harm cost: seconds, and steps where it ended the run."""
    figures: dict[str, Any] = {"cable_of_the_worker": here.cut(WORKER)}
    here.goes_on("after that")
    here.lose_power(WORKER)
    time.sleep(5.0)
    here.start_ray(WORKER)
    figures["power_of_the_worker"] = {"next_step_s": here.goes_on("after it came back", 1)}
    here.goes_on("after that")
    figures["cable_of_a_rank"] = here.cut(OTHER_RANK)
    here.goes_on("after that")
    before = here.step
    here.lose_power(OTHER_RANK)
    figures["power_of_a_rank"] = here.resume(before)
    here.goes_on("after that")
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="nothing is cut or killed")
    args = parser.parse_args(arguments)
    from tests.machines import refusal

    if reason := refusal():
        print(json.dumps({"benchmark": "hosts", "skipped": reason}))
        return 0
    figures = play(harm=not args.quick)
    for name, value in figures.items():
        print(f"{name:22}{value}")
    print(json.dumps({"benchmark": "hosts", **figures, "cores": os.cpu_count()}))
    return int(bool(figures["problems"]))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
