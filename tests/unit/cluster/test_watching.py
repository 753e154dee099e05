"""Who holds up ranks that do not move, told from what each of them does."""

from __future__ import annotations

import threading
import time

import pytest

from rlflow.cluster.watching import Doing, Stillness, Work, verdict
from rlflow.net.calls import RunningTime


def at(file: str, instruction: int = 0) -> Doing:
    return Doing(
        "update", (("/x/rlflow/loop.py", 1, "call", 0), (f"/site/{file}", 7, "work", instruction))
    )


WAITING = at("torch/distributed/distributed_c10d.py")
PIPELINE = at("megatron/core/pipeline_parallel/p2p_communication.py")
LOSS = "rank {} is at /site/loss.py:7 in work"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (
            {0: WAITING, 1: at("loss.py"), 2: PIPELINE},
            f"{LOSS.format(1)}; waiting for it: ranks 0, 2",
        ),
        (
            {0: WAITING, 1: None, 2: at("loss.py")},
            "rank 1 does not answer (stopped?); waiting for it: ranks 0, 2",
        ),
        ({0: at("loss.py"), 1: at("loss.py")}, f"{LOSS.format(0)}, {LOSS.format(1)}"),
        ({0: at("loss.py"), 1: Doing()}, f"{LOSS.format(0)}; waiting for it: rank 1"),
    ],
    ids=["works", "is silent", "all work", "has not begun"],
)
def test_the_culprit_is_who_does_not_wait_for_others(
    found: dict[int, Doing | None], expected: str
) -> None:
    assert verdict("update", found, [], 5) == f"update: nothing moved for 5 s: {expected}"


def test_the_verdict_is_one_line_with_phase_culprit_place_and_who_waits() -> None:
    told = verdict("update", {0: WAITING, 1: at("my/loss.py"), 2: WAITING}, [3], limit_s=300)
    culprit = "rank 1 is at site/my/loss.py:7 in work"
    assert (
        told
        == f"update: nothing moved for 300 s: {culprit}; waiting for it: ranks 0, 2; finished: rank 3"
    )
    assert "rank 1 does not answer (stopped?)" in verdict("save", {0: WAITING, 1: None}, [], 5)


def looks(*found: tuple[float, dict[int, Doing | None]]) -> list[bool]:
    """What looks at so many seconds say, where ranks may stand still for 10."""
    now = [0.0]
    stillness = Stillness(10, RunningTime(100, lambda: now[0]))
    told = []
    for seconds, doing in found:
        now[0] = seconds
        told.append(stillness.look(doing))
    return told


def test_ranks_are_still_when_none_that_answers_has_moved_for_the_limit() -> None:
    still = {0: WAITING, 1: None}
    moving = [(0, {0: WAITING, 1: at("loss.py", 1)}), (9, {0: WAITING, 1: at("loss.py", 2)})]
    assert looks(*moving, (18, still), (19, still)) == [False, False, False, True]


def test_a_rank_that_answers_again_as_before_has_not_moved() -> None:
    assert looks((0, {0: WAITING}), (5, {0: None}), (10, {0: WAITING}), (11, {0: PIPELINE})) == [
        False,
        False,
        True,
        False,
    ]


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
    assert (
        any(function == "hang_here" for _, _, function, _ in first.frames)
        and "hang_here" in first.stack()
    )
    done.set()
    thread.join()
    assert work.look() == Doing() and work.look().place == "idle"
