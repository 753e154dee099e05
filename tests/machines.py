"""Machines of a Ray cluster on this one: network namespaces of Linux, each with its address, host name and shared memory.

Each has a cable to one switch, which can be cut and mended. Needs root and iproute2; `refusal` says what is missing."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

PORT = 6379
START_S = 90.0  # of a node of Ray, on a busy machine
CLEAN = {"RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
"""Variables of who joins the cluster."""
_NUMBERS = itertools.count()


def refusal() -> str:
    """Why there can be no machines here; "" where there can."""
    if (
        not sys.platform.startswith("linux")
        or shutil.which("ip") is None
        or shutil.which("unshare") is None
    ):
        return "needs Linux with iproute2 and util-linux"
    name = f"rlflow-try-{os.getpid()}"
    for command in (
        ["ip", "netns", "add", name],
        ["ip", "netns", "exec", name, "unshare", "--uts", "hostname", "x"],
    ):
        tried = subprocess.run(command, capture_output=True, text=True, check=False)
        if tried.returncode:
            break
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    said = next(iter(tried.stderr.strip().splitlines()), "")
    return f"network namespaces are not allowed here: {said}" if tried.returncode else ""


class Machines:
    """Machines 0, 1, ... on one switch; gone, with all that runs on them, after `close`."""

    def __init__(self, count: int = 2) -> None:
        unique = f"{os.getpid()}-{next(_NUMBERS)}"
        self._switch = f"rlflow-{unique}-switch"
        self._names = [f"rlflow-{unique}-{number}" for number in range(count)]
        self.addresses = [f"10.77.0.{number + 1}" for number in range(count)]
        self._folder = tempfile.mkdtemp(prefix="ray")  # short, for the names of Ray's sockets
        self._holders: list[subprocess.Popen[bytes]] = []
        self._started: list[subprocess.Popen[bytes]] = []
        try:
            _ip("netns", "add", self._switch)
            _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "switch", "up")
            for number in range(count):
                self._connect(number)
        except BaseException:
            self.close()
            raise

    def _connect(self, number: int) -> None:
        """A machine with a cable to the switch."""
        name, plug = self._names[number], f"plug{number}"
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
        cable = ["cable", "netns", name, "type", "veth"]
        _ip("link", "add", *cable, "peer", "name", plug, "netns", self._switch)
        _ip("-n", self._switch, "link", "set", plug, "master", "switch", "up")
        _ip("-n", name, "address", "add", f"{self.addresses[number]}/24", "dev", "cable")
        _ip("-n", name, "link", "set", "cable", "up")
        _ip("-n", name, "route", "add", "default", "dev", "cable")
        inside = 'mount -t tmpfs tmpfs /dev/shm && hostname "$0" && echo && exec sleep infinity'
        unshare = ["unshare", "--uts", "--mount", "sh", "-c", inside, name]
        holder = subprocess.Popen(["ip", "netns", "exec", name, *unshare], stdout=subprocess.PIPE)
        self._holders.append(holder)
        assert holder.stdout is not None and holder.stdout.readline(), "no machine"

    @property
    def cluster(self) -> str:
        """The address of the Ray cluster whose head is machine 0."""
        return f"{self.addresses[0]}:{PORT}"

    def cut(self, machine: int = 1) -> None:
        """No packet reaches the machine or leaves it from now on, and nobody is told."""
        _ip("-n", self._switch, "link", "set", f"plug{machine}", "nomaster")

    def mend(self, machine: int = 1) -> None:
        """Its cable is whole again."""
        _ip("-n", self._switch, "link", "set", f"plug{machine}", "master", "switch")

    def command(self, machine: int, command: Sequence[str]) -> list[str]:
        """The command on that machine, which has a host name and a /dev/shm of its own."""
        inside = [
            "nsenter",
            f"--target={self._holders[machine].pid}",
            "--net",
            "--uts",
            "--mount",
            f"--wd={os.getcwd()}",
        ]
        return [*inside, *command]

    def start_ray(self, machine: int, cpus: int) -> subprocess.Popen[bytes]:
        """A node of Ray on the machine, the head on machine 0; returns when it is up. A second one may follow the first."""
        role = (
            ["--head", f"--port={PORT}", "--include-dashboard=false"]
            if machine == 0
            else [f"--address={self.cluster}"]
        )
        log = Path(self._folder) / f"{machine}.log"
        ray = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", *role, "--block",
               f"--node-ip-address={self.addresses[machine]}", f"--num-cpus={cpus}", "--disable-usage-stats",
               f"--temp-dir={self._folder}", "--object-store-memory=100000000"]  # fmt: skip
        until = time.monotonic() + START_S
        node, said = self._start(machine, ray, log), ""
        while "Ray runtime started" not in said:
            time.sleep(0.1)
            said = log.read_text(errors="replace")
            assert time.monotonic() < until, (
                f"Ray did not start on machine {machine}: {said[-2000:]}"
            )
            if node.poll() is not None:  # it gives up after 30 s of its own, on a busy machine too
                node = self._start(machine, ray, log)
        return node

    def _start(self, machine: int, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        with open(log, "wb") as output:
            node = subprocess.Popen(
                self.command(machine, command),
                stdout=output,
                stderr=output,
                env={**os.environ, **CLEAN},
                start_new_session=True,
            )
        self._started.append(node)
        return node

    def end_ray(self, node: subprocess.Popen[bytes], how: signal.Signals = signal.SIGTERM) -> None:
        """Ends a node and its processes: in order, or as when the power fails."""
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(node.pid).children(recursive=True)
            if how == signal.SIGKILL:
                for process in (psutil.Process(node.pid), *family):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            else:
                node.send_signal(how)
            for process in psutil.wait_procs(family, timeout=15)[1]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        node.kill()
        node.wait()

    def processes(self, machine: int) -> list[psutil.Process]:
        """All that runs on the machine."""
        told = subprocess.run(
            ["ip", "netns", "pids", self._names[machine]],
            capture_output=True,
            text=True,
            check=False,
        )
        found = []
        for pid in told.stdout.split():
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return found

    def close(self) -> None:
        """Ends what runs there, and removes the machines."""
        for node in self._started:
            self.end_ray(node, signal.SIGKILL)
        for machine in range(len(self._names)):
            left = self.processes(machine)
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=10)
            if machine < len(self._holders):
                self._holders[machine].wait()
        for name in (*self._names, self._switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
        shutil.rmtree(self._folder, ignore_errors=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
