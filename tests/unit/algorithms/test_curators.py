"""Curators that leave tasks out, against the numbers of their sources and after a restart."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlflow.algorithms.base import Curator
from rlflow.algorithms.curators.adaptive import Adaptive
from rlflow.algorithms.curators.filter_solved import FilterSolved
from rlflow.algorithms.curators.greso import Greso
from rlflow.types import Task
from tests.unit.algorithms.groups import group

EASY, HARD, MIXED = [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]


def tasks(count: int) -> list[Task]:
    return [Task(str(number), str(number)) for number in range(count)]


def names(taken: list[Task]) -> list[str]:
    return [task.id for task in taken]


def test_a_task_counts_as_solved_by_its_running_share() -> None:
    """Five groups that are all correct give .1, .19, .271, .3439, .40951; the task goes when .95 is reached: after 29."""
    curator, shares = FilterSolved(tasks(2), seed=0, shuffle=False), []
    for _ in range(28):
        curator.observe([group("0", EASY)])
        shares.append(curator.state_dict()["shares"]["0"])
    assert shares[:5] == pytest.approx([0.1, 0.19, 0.271, 0.3439, 0.40951], abs=1e-12)
    assert 1 - 0.9**28 < 0.95 <= 1 - 0.9**29 and names(curator.take(4)) == [*"0101"]
    curator.observe([group("0", EASY)])
    assert names(curator.take(3)) == [*"111"]
    assert curator.report() == {"tasks_passed_over": 3, "tasks_solved": 1}
    curator.observe([group("0", [None, None])])  # nothing is known of aborted attempts
    curator.observe([group("0", [0.5, 0.0])])  # of any return above 0, half
    assert curator.state_dict()["shares"]["0"] == pytest.approx(0.9 * (1 - 0.9**29) + 0.05)
    assert names(curator.take(2)) == [*"01"]


def test_where_all_are_solved_there_are_no_more_tasks() -> None:
    curator = FilterSolved(tasks(3), seed=0, solved=0.09)
    curator.observe([group(str(number), EASY) for number in range(3)])
    assert curator.take(2) == [] and curator.epoch == 1


def test_a_streak_without_variance_makes_a_task_rarer_down_to_its_floor() -> None:
    """z = 4 easy, p .5: max(.0625, .10) = .10; z = 2 hard: max(.25, .40) = .40."""
    curator = Greso(tasks(4), seed=0)
    assert curator.probability("0") == 1
    found = []
    for _ in range(4):
        curator.observe([group("0", EASY)])
        found.append(curator.probability("0"))
    assert found == [0.5, 0.25, 0.125, 0.10]
    curator.observe([group("1", HARD)] * 2)
    assert curator.probability("1") == 0.40
    free = Greso(tasks(4), seed=0, hard_floor=0.0)
    free.observe([group("1", HARD)] * 2)
    assert free.probability("1") == 0.25
    curator.observe([group("0", HARD)])
    assert curator.probability("0") == 0.5  # another kind: the streak begins again at 1
    curator.observe([group("0", MIXED)])
    assert curator.probability("0") == 1
    curator.observe([group("1", [None])])
    assert curator.probability("1") == 0.40  # says nothing
    curator.observe([group("2", HARD, segments=[])])  # agents whose first request was refused
    assert curator.probability("2") == 0.5


def test_the_base_probabilities_follow_the_observed_shares_once_the_first_pass_is_over() -> None:
    curator = Greso(tasks(4), seed=0)
    curator.observe(
        [group("0", EASY, 0), group("1", EASY, 1)]
    )  # the weights changed, in the first pass
    assert curator.report() == {"tasks_passed_over": 0, "greso_p_easy": 0.5, "greso_p_hard": 0.5}
    curator.take(4)
    curator.observe(
        [group(str(number % 4), MIXED, 1) for number in range(10)]
    )  # with one easy before: 1/11 >= .083
    curator.observe([group("0", MIXED, 2)])
    assert curator.report()["greso_p_easy"] == pytest.approx(0.49) and curator.report()[
        "greso_p_hard"
    ] == pytest.approx(0.51)
    curator.observe([group("0", HARD, 2)])  # 1 of 2 hard, none easy
    curator.observe([group("0", MIXED, 3)])
    assert curator.report()["greso_p_easy"] == pytest.approx(0.50) and curator.report()[
        "greso_p_hard"
    ] == pytest.approx(0.50)
    for version in range(4, 120):
        curator.observe([group("0", MIXED, version)])
    assert curator.report()["greso_p_easy"] == curator.report()["greso_p_hard"] == 0.99


def test_tasks_come_as_often_as_their_probability_says_and_a_step_is_always_full() -> None:
    curator = Greso(tasks(10), seed=0, shuffle=False)
    curator.observe([group("3", EASY)] * 9)
    taken = names(curator.take(5000))
    assert taken.count("3") / taken.count("4") == pytest.approx(0.10, abs=0.04)
    barren = Greso(tasks(3), seed=0, easy_floor=0.0)
    for number in range(3):
        barren.observe([group(str(number), EASY)] * 60)
    assert len(barren.take(7)) == 7


def play(curator: Curator, begin: int, end: int) -> list[str]:
    """Steps of four tasks, of which each is easy, hard or neither by its number; the weights change every step."""
    taken: list[str] = []
    for step in range(begin, end):
        found = curator.take(4)
        taken += names(found)
        curator.observe(
            [group(task.id, (EASY, HARD, MIXED)[int(task.id) % 3], step) for task in found]
        )
    return taken


@pytest.mark.parametrize("kind, options", [(FilterSolved, {"solved": 0.3}), (Greso, {})])
def test_a_restored_curator_goes_on_as_it_would_have(kind: Any, options: dict[str, Any]) -> None:
    expected = play(kind(tasks(9), 3, **options), 0, 30)
    first, second = (kind(tasks(9), 3, **options) for _ in range(2))
    begun = play(first, 0, 13)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert begun + play(second, 13, 30) == expected


def test_a_solved_task_gets_fewer_attempts_and_none_more_turns_than_a_success_had() -> None:
    """Of 8, above .6: 8 (1 - SR) / .4, so 5 at .75 and 2, the least, from .9 on; successes of 7 and 12 turns cap at 12."""
    curator = Adaptive(tasks(1), seed=0, decay=0.0)
    found = []
    for won in (0, 4, 6, 7, 8):
        curator.observe([group("0", [1.0] * won + [0.0] * (8 - won))])
        found.append(curator.attempts_of("0"))
    assert found == [8, 8, 5, 2, 2]  # round(2.5) is 2
    for options, most in (({"samples": 16}, 16), ({"samples": 16, "attempts": 4}, 4)):
        assert Adaptive(tasks(1), seed=0, **options).attempts_of("0") == most
    (task,) = curator.take(1)
    assert (task.most_attempts, task.most_turns) == (2, 1) and curator.report() == {
        "attempts_spared": 6
    }
    long = group("0", EASY)
    for one, turns in zip(long.trajectories, (7, 12), strict=True):
        one.turns = one.turns * turns
    curator.observe([long, group("0", [None])])
    assert curator.take(1)[0].most_turns == 12


def test_the_rate_of_success_is_a_running_mean_and_lengths_can_be_left_out() -> None:
    curator = Adaptive(tasks(2), seed=0, shuffle=False, lengths=False)
    curator.observe([group("0", EASY), group("0", MIXED)])
    assert curator.state_dict()["rates"] == {"0": 0.75}
    first, second = curator.take(2)
    assert (first.most_attempts, first.most_turns) == (5, None) and second.most_attempts == 8
    again = Adaptive(tasks(2), seed=0, shuffle=False)
    again.load_state_dict(json.loads(json.dumps(curator.state_dict())))
    assert again.attempts_of("0") == 5 and names(again.take(1)) == ["0"]
