"""A call that holds Python's interpreter is named and ended from outside; a process that was stopped is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from rlflow.run.interrupt import InterpreterWatch

HOLDING = """
import re, threading
from rlflow.run import interrupt
interrupt.WORD_S = interrupt.FLOOR_S = 1.0
def hold():
    re.match("(a+)+$", "a" * 60 + "b")
with interrupt.InterpreterWatch(3.0, "the option"):
    threading.Thread(target=hold).start()
    threading.Event().wait()
"""


def test_a_call_that_holds_the_interpreter_is_named_and_ended() -> None:
    done = subprocess.run([sys.executable, "-c", HOLDING], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    word, _, rest = done.stderr.partition("\n")
    assert word == "rlflow: one call holds the interpreter, nothing else has run for 1 s; it has 3 s. It is in:"
    assert "in match" in rest and "in hold" in rest and "in wait" not in rest
    assert rest.splitlines()[-1].startswith("rlflow: ended: one call has held the interpreter for 3 s (the option). Rel")


STOPPED = """
import os
from rlflow.run import interrupt
interrupt.WORD_S = interrupt.FLOOR_S = 1.0
with interrupt.InterpreterWatch(2.0, "the option"):
    print("ready", flush=True)
    input()
print("ended")
"""


def test_a_process_that_was_stopped_is_not_blamed() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(4.0)
    process.send_signal(signal.SIGCONT)
    assert process.communicate("\n", timeout=30) == ("ended\n", "")


def test_nothing_stays_behind() -> None:
    threads = threading.active_count()
    with InterpreterWatch(60.0, "the option") as watch:
        pass
    assert threading.active_count() == threads
    with pytest.raises(ProcessLookupError):
        os.kill(watch._process.pid, 0)
