"""The arithmetic of running ahead: who may start, whom a step takes, who is too old."""

from __future__ import annotations

import pytest

from rlflow.rollout.pacing import Choice, GroupAge, Pacing


def test_room_is_that_of_the_admission_inequality() -> None:
    """Four groups a step, one step ahead: eight may have been issued by version 0, by version 1 twelve, four of them trained."""
    pacing = Pacing(prompts=4, max_staleness=1, run_ahead=1)
    assert [pacing.room(groups) for groups in (0, 5, 8, 9)] == [8, 3, 0, 0]
    assert pacing.room(12 - 4 - 4) == 4  # version 1: four more were finished, none is running


def test_without_staleness_a_step_waits_for_all_that_it_started() -> None:
    pacing = Pacing(prompts=2)
    assert pacing.room(0) == 2 and pacing.room(2) == 0
    assert pacing.choose(5, [GroupAge(10, 5, True), GroupAge(11, 5, False)], 2) == Choice((), ())
    assert pacing.choose(5, [GroupAge(10, 5, True), GroupAge(11, 5, True)], 2) == Choice(
        (10, 11), ()
    )


def test_a_step_takes_what_is_finished_and_waits_only_for_what_would_be_too_old_next() -> None:
    pacing = Pacing(prompts=2, max_staleness=2, run_ahead=1)
    slow, started, new = GroupAge(0, 4, False), GroupAge(1, 5, True), GroupAge(2, 5, True)
    assert pacing.choose(5, [slow, started, new], 2) == Choice((1, 2), ())
    later = [GroupAge(0, 4, False), GroupAge(3, 6, True), GroupAge(4, 6, True)]
    assert pacing.choose(6, later, 2) == Choice((), ())  # version 4 is 2 behind: now or never
    assert pacing.choose(6, [GroupAge(0, 4, True), *later[1:]], 2) == Choice((0, 3), ())


def test_the_oldest_tokens_are_served_first_what_has_none_before_all_and_the_too_old_never() -> (
    None
):
    """Version 13, at most 8 behind; the oldest tokens of a to e are of 12, 3, 12, none at all and 5."""
    pacing = Pacing(prompts=1, max_staleness=8, run_ahead=8, when_stale="drop")
    ages = {"a": 12, "b": 3, "c": 12, "d": None, "e": 5}
    groups = [GroupAge(number, age, True) for number, age in enumerate(ages.values())]
    served = []
    while choice := pacing.choose(13, groups, 1).claim:
        served += ["abcde"[number] for number in choice]
        groups = [group for group in groups if group.number not in choice and group.number != 1]
    assert served == ["d", "e", "a", "c"]
    assert pacing.choose(13, [GroupAge(1, 3, True)], 1) == Choice(
        (), (1,)
    )  # 13 - 3 = 10 > 8; 13 - 5 = 8 is kept


def test_what_was_sampled_again_is_waited_for_the_second_time() -> None:
    pacing = Pacing(prompts=1, max_staleness=1, run_ahead=2, when_stale="drop")
    other = GroupAge(9, 8, True)
    assert pacing.choose(8, [GroupAge(3, 7, False, again=0), other], 1) == Choice((9,), ())
    assert pacing.choose(8, [GroupAge(3, 7, False, again=1), other], 1) == Choice((), ())


def test_fewer_groups_make_a_step_only_where_no_more_can_come() -> None:
    pacing = Pacing(prompts=4, max_staleness=2, run_ahead=1)
    assert pacing.choose(0, [GroupAge(0, 0, True)], 4) == Choice((0,), ())
    assert pacing.choose(0, [GroupAge(0, 0, True), GroupAge(1, None, False)], 4) == Choice((), ())
    assert pacing.choose(0, [], 4) == Choice((), ())


@pytest.mark.parametrize("groups, wanted, claim", [(3, 2, (0, 1)), (3, 3, (0, 1, 2))])
def test_no_more_than_wanted_is_claimed(groups: int, wanted: int, claim: tuple[int, ...]) -> None:
    pacing = Pacing(prompts=3, max_staleness=1, run_ahead=1)
    assert (
        pacing.choose(1, [GroupAge(number, 1, True) for number in range(groups)], wanted).claim
        == claim
    )
