"""Children of a fork, a process pool's for one, keep nothing of the run that they came from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rlflow.storage.lock import DirectoryLock
from tests.unit.run.programs import WITHOUT_TORCH

ROOT = Path(__file__).resolve().parents[3]


def play(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


POOL = f"""{WITHOUT_TORCH}
import multiprocessing, time
from rlflow.run.interrupt import Interrupt
with Interrupt(grace_s=1.0) as interrupt:
    interrupt.graceful = True
    pools = [multiprocessing.get_context("fork").Pool(2) for _ in range(2)]
    assert pools[0].map(abs, [-1, -2]) == [1, 2]
    pools[0].terminate()  # by SIGTERM: the children's matter, no question to the run
    pools[0].join()
    time.sleep(2.0)  # past the grace
    began = time.monotonic()
print("ended", interrupt.requested, time.monotonic() - began < 5)
pools[1].terminate()
"""


def test_a_pool_of_processes_neither_holds_up_a_run_nor_interrupts_it() -> None:
    done = play(POOL)
    assert (done.returncode, done.stdout) == (0, "ended None True\n"), done.stderr


ORPHAN = """
import os, signal, sys, time
from pathlib import Path
from rlflow.storage.lock import DirectoryLock
lock = DirectoryLock(Path(sys.argv[1]))
child = os.fork()
if not child:
    os.close(1), os.close(2)
    time.sleep(60)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_an_orphan_does_not_hold_the_directory_of_a_killed_run(tmp_path: Path) -> None:
    orphan = int(play(ORPHAN, str(tmp_path)).stdout)
    try:
        DirectoryLock(tmp_path).close()
    finally:
        subprocess.run(["kill", "-9", str(orphan)], check=True)  # also: it lived


BACK = """
import asyncio, os
from rlflow.net.calls import CallThreads, call
from rlflow.rollout.event_loop import LoopThread
threads, loop = CallThreads(1, "plain"), LoopThread("asynchronous")
def plain():
    return os.fork() and os.getpid()
async def asynchronous():
    child = os.fork()
    await asyncio.sleep(0)
    return child and os.getpid()
for method in (plain, asynchronous):
    print(loop.run(call(threads, method, (), 30.0, method.__name__)) == os.getpid(), flush=True)
    while os.wait()[1] == 0:
        pass
loop.close()
"""


def test_a_child_that_comes_back_from_a_call_is_ended_and_its_parent_goes_on() -> None:
    done = play(BACK)
    assert (done.returncode, done.stdout) == (0, "True\nTrue\n"), done.stderr
    assert done.stderr.count("forked, and the child came back from it: it is ended here") == 2
