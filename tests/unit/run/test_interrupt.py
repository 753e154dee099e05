"""Signals: the first one asks, a further one ends the process, whatever hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from rlflow.run.interrupt import Interrupt, Stopped
from tests.unit.run.programs import WITHOUT_TORCH

PROGRAM = """
import ctypes, sys, time
from rlflow.run.interrupt import Interrupt
with Interrupt(grace_s=0.2) as interrupt:
    interrupt.graceful = {graceful}
    print("ready", flush=True)
    {hang}
print("ended", interrupt.requested)
"""
NATIVE = "mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock; lock(mutex); lock(mutex)"
CLEANING_UP = """
    try:
        time.sleep(30)
    finally:
        time.sleep(30)
"""
DEAF = """
    while True:
        try:
            time.sleep(30)
        except BaseException:
            pass
"""
POLITE = """
    while not interrupt.requested:
        time.sleep(0.01)
"""


def play(hang: str, signals: list[int], graceful: bool = True) -> tuple[int, str, str]:
    """(exit status, stdout after "ready", stderr) of a process that hangs and gets the signals."""
    program = WITHOUT_TORCH + PROGRAM.format(graceful=graceful, hang=hang)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for number in signals:
            time.sleep(0.1)
            process.send_signal(number)
        out, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    return process.returncode, out, errors


def test_the_first_signal_only_asks() -> None:
    assert play(POLITE, [signal.SIGTERM])[:2] == (0, "ended SIGTERM\n")


@pytest.mark.parametrize(
    "hang",
    [NATIVE, pytest.param(CLEANING_UP, marks=pytest.mark.slow), DEAF],
    ids=["native code", "cleaning up", "deaf"],
)
def test_a_second_signal_ends_the_process_whatever_hangs(hang: str) -> None:
    status, _, errors = play(hang, [signal.SIGTERM, signal.SIGTERM])
    assert status == 128 + signal.SIGTERM
    assert "SIGTERM: the process ends without closing what hangs (in " in errors


def test_before_the_first_step_one_signal_is_enough() -> None:
    assert play(CLEANING_UP, [signal.SIGINT], graceful=False)[0] == 128 + signal.SIGINT


def test_what_closes_in_time_is_left_to_close_and_nothing_stays_behind() -> None:
    before = signal.getsignal(signal.SIGTERM), threading.active_count()
    with pytest.raises(Stopped), Interrupt(grace_s=0.1):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    time.sleep(0.2)  # past the grace
    assert (signal.getsignal(signal.SIGTERM), threading.active_count()) == before
