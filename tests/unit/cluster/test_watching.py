"""Who holds up ranks that do not move, told from what each of them does."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlflow.cluster.trainer import RayTrainer
from rlflow.cluster.watching import Doing, StallLimits, Stillness, Work, culprits, native_stack, verdict
from rlflow.rollout.calls import RunningTime


def at(file: str, instruction: int = 0) -> Doing:
    return Doing("update", (("/x/rlflow/loop.py", 1, "call", 0), (f"/site/{file}", 7, "work", instruction)))


WAITING = at("torch/distributed/distributed_c10d.py")
PIPELINE = at("megatron/core/pipeline_parallel/p2p_communication.py")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({0: WAITING, 1: at("loss.py"), 2: PIPELINE}, [1]),
        ({0: WAITING, 1: None, 2: at("loss.py")}, [1]),
        ({0: WAITING, 1: WAITING}, [0, 1]),
        ({0: at("loss.py"), 1: at("loss.py")}, [0, 1]),
    ],
    ids=["works", "is silent", "all wait", "all work"],
)
def test_the_culprit_is_who_does_not_wait_for_others(found: dict[int, Doing | None], expected: list[int]) -> None:
    assert culprits(found) == expected


def test_the_verdict_is_one_line_with_phase_culprit_place_and_who_waits() -> None:
    told = verdict("update", {0: WAITING, 1: at("my/loss.py"), 2: WAITING}, [3], limit_s=300)
    culprit = "rank 1 is at site/my/loss.py:7 in work"
    assert told == f"update: nothing moved for 300 s: {culprit}; waiting for it: ranks 0, 2; finished: rank 3"
    assert "rank 1 does not answer (stopped?)" in verdict("save", {0: WAITING, 1: None}, [], 5)


def test_ranks_are_still_when_none_has_moved_for_the_limit() -> None:
    stillness = Stillness(limit_s=10)
    assert not stillness.look({0: WAITING, 1: at("loss.py", 1)}, now_s=0)
    assert not stillness.look({0: WAITING, 1: at("loss.py", 2)}, now_s=9), "rank 1 moved"
    assert not stillness.look({0: WAITING, 1: None}, now_s=18)
    assert stillness.look({0: WAITING, 1: None}, now_s=19)
    assert not stillness.look({}, now_s=99)


def test_ranks_that_were_stopped_with_the_driver_get_their_limit_afterwards() -> None:
    now = [0.0]
    stillness = Stillness(limit_s=10, time=RunningTime(2.5, lambda: now[0]))
    stillness.look({0: WAITING})
    now[0] = 3600.0
    assert not stillness.look({0: WAITING}), "a suspended job"
    now[0] += 3.0
    assert not stillness.look({0: WAITING})
    now[0] += 3.0
    assert stillness.look({0: WAITING})


def test_a_rank_that_answers_again_as_before_has_not_moved() -> None:
    stillness = Stillness(limit_s=10)
    stillness.look({0: WAITING}, now_s=0)
    stillness.look({0: None}, now_s=5)
    assert stillness.look({0: WAITING}, now_s=10)
    assert not stillness.look({0: PIPELINE}, now_s=11)


def test_work_is_seen_from_another_thread() -> None:
    work, begun, done = Work(), threading.Event(), threading.Event()

    def hang_here() -> None:
        work.begin("update")
        begun.set()
        done.wait(5)
        work.end()

    thread = threading.Thread(target=hang_here)
    thread.start()
    begun.wait(5)
    time.sleep(0.05)
    first, second = work.look(), work.look()
    assert first == second and first.phase == "update"
    assert any(function == "hang_here" for _, _, function, _ in first.frames) and "hang_here" in first.stack()
    done.set()
    thread.join()
    assert work.look() == Doing() and work.look().place == "idle"


def test_a_rank_that_is_silent_ends_a_call_in_which_the_others_move() -> None:
    stillness = Stillness(limit_s=10)
    looks = {
        now: stillness.look({0: at("poll.py", now), 1: WAITING if now == 0 else None}, now_s=now) for now in range(21)
    }
    assert not any(looks[now] for now in range(20)) and looks[20]


def test_a_deadline_grows_with_what_a_call_took_and_never_falls_below_its_floor() -> None:
    deadlines = StallLimits(floor_s=100)
    assert deadlines.of("save") == 100
    deadlines.took("save", 20)
    assert deadlines.of("save") == 100
    deadlines.took("save", 50)
    deadlines.took("save", 40)
    assert deadlines.of("save") == 150 and deadlines.of("update") == 100


def test_a_call_through_which_the_driver_was_stopped_makes_later_ones_no_more_patient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wait(pending: list[int], **options: object) -> tuple[list[int], list[int]]:
        time.sleep(1.0)  # in which a stopped driver looks at nothing
        return pending, []

    # The rank's answer is its call.
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(wait=wait, get=lambda calls: calls))
    monkeypatch.setattr("rlflow.cluster.trainer.LOOK_EVERY_S", 0.05)
    trainer = RayTrainer.__new__(RayTrainer)
    trainer._phase, trainer._deadlines = "update", StallLimits(floor_s=0.0)
    assert trainer._gather([1]) == [1]
    assert trainer._deadlines.of("update") == pytest.approx(3 * 2 * 0.05, abs=0.2)


def test_py_spy_is_asked_where_it_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert native_stack(os.getpid()) == ""
    program = tmp_path / "py-spy"
    program.write_text('#!/bin/sh\necho "asked $*"\n')
    program.chmod(0o755)
    assert native_stack(77) == "asked dump --nonblocking --pid 77"
    program.write_text("#!/bin/sh\nexit 1\n")
    assert native_stack(77) == ""
