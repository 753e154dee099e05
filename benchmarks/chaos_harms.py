"""What `chaos.py` does to the processes of a run."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Harm:
    """share: how often it happens beside the others. victim: what the command line of the process has; None: the driver. seconds:
    after at most so many it goes on."""

    share: int
    victim: str | None
    signal: signal.Signals = signal.SIGKILL
    seconds: float | None = None


CABLE = "cable"
HARMS = {
    "worker killed": Harm(5, "WorkerActor"),
    "worker stopped": Harm(3, "WorkerActor", signal.SIGSTOP),
    "rank killed": Harm(1, "TrainerRank"),
    "rank stopped": Harm(1, "TrainerRank", signal.SIGSTOP),
    "driver killed": Harm(1, None),
    "driver paused": Harm(1, None, signal.SIGSTOP, 6.0),
    "retrieval killed": Harm(1, "rlflow_environments.retrieval"),
    "retrieval paused": Harm(1, "rlflow_environments.retrieval", signal.SIGSTOP, 6.0),
    "driver suspended": Harm(1, None, signal.SIGSTOP),
    "tools out": Harm(2, None, seconds=12.0),
    "directory stolen": Harm(1, None),
    "peers slow": Harm(1, None, seconds=10.0),
    "pool killed": Harm(2, "multiprocessing.spawn"),
    "engine killed": Harm(2, "rlflow_vllm.start"),
    "cable cut": Harm(2, CABLE, seconds=12.0),
}


def suspend(driver: psutil.Process, everything: bool, seconds: float) -> None:
    """Stops the driver, or all that it started as well, for so long, as a scheduler does."""
    stopped = [driver, *(driver.children(recursive=True) if everything else [])]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for one in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(number)
        if number == signal.SIGSTOP:
            time.sleep(seconds)


def crowd(services: Sequence[psutil.Process], seconds: float) -> None:
    """Connections that send a byte per second, to every port that the processes listen at."""
    peers = []
    for one in services:
        with contextlib.suppress(psutil.Error, OSError):
            found = one.net_connections("tcp")
            heard = {other.laddr for other in found if other.status == psutil.CONN_LISTEN}
            peers += [socket.create_connection(at, 2.0) for at in heard for _ in range(16)]
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.send(b"P", socket.MSG_DONTWAIT)
        time.sleep(1.0)
    for peer in peers:
        peer.close()


def session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def command_of(process: psutil.Process) -> str:
    """ "" for one that has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def processes_left(sessions: Sequence[int], within_s: float = 20.0) -> list[str]:
    """Processes of these sessions that are still there after so long."""
    until = time.monotonic() + within_s
    while left := [
        one for one in psutil.process_iter() if session_of(one.pid) in sessions and command_of(one)
    ]:
        if time.monotonic() > until:
            break
        time.sleep(0.5)
    return [command_of(one)[:100] for one in left]


def last_words(process: subprocess.Popen[bytes], log: Path) -> str:
    """The error that a driver ended with, or how."""
    lines = log.read_text(errors="replace").splitlines()
    said = [line for line in lines if line.startswith("rlflow: ")]
    code = process.poll()
    return said[-1] if said and code is not None and code > 0 else f"exit code {code}"
