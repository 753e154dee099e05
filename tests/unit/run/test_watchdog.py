"""A trainer in the run's own process that hangs is told of, once, with its phase and where it is."""

from __future__ import annotations

import time

import pytest

from rlflow.report.timer import PhaseTimer
from rlflow.run.interrupt import Watchdog


def hang(seconds: float) -> None:
    time.sleep(seconds)


def at_depth(depth: int) -> None:
    if depth:
        at_depth(depth - 1)
    else:
        time.sleep(0.01)


def test_what_does_not_move_is_told_of_once_with_phase_and_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    timer = PhaseTimer()
    with Watchdog(timer, limit_s=0.2), timer.phase("update"):
        hang(0.8)
    told = [
        record.getMessage() for record in caplog.records if record.name == "rlflow.run.interrupt"
    ]
    assert len(told) == 1 and told[0].startswith("update: the trainer has not moved for 0.2 s")
    assert "in hang" in told[0] and "test_watchdog.py" in told[0]


def test_nothing_is_said_of_what_moves_or_waits_for_episodes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    timer = PhaseTimer()
    with Watchdog(timer, limit_s=0.4):
        with timer.phase("rollout"):
            hang(0.9)
        with timer.phase("update"):
            for depth in range(90):
                at_depth(depth)
    assert not [record for record in caplog.records if record.name == "rlflow.run.interrupt"]
