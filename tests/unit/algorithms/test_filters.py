"""Filters: which groups and attempts a step learns from, and what they remember."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.algorithms.advantages.grpo import grpo
from rlflow.algorithms.base import Filter
from rlflow.algorithms.filters.dynamic_sampling import DynamicSampling, scores_alike
from rlflow.algorithms.filters.earlier_groups import Replay
from rlflow.algorithms.filters.overlong_filter import OverlongFilter
from rlflow.algorithms.filters.success_pool import SuccessPool
from rlflow.algorithms.filters.zero_advantage import ZeroAdvantage
from rlflow.batching import make_batch
from rlflow.run.checkpoints import RunState, read_state
from rlflow.types import Group, StopReason
from tests.unit.algorithms.groups import group, rewards


def names(groups: list[Group]) -> list[str]:
    return [one.task.id for one in groups]


def through_a_checkpoint(state: Any, folder: Path) -> Any:
    """The state as a resumed run reads it."""
    folder.mkdir(exist_ok=True)
    RunState({"part": state}).write(folder)
    return read_state(folder)["part"]


@pytest.mark.parametrize(
    "scores, alike",
    [([0, 0], True), ([1, 0], False), ([1], True), ([], True), ([None, None], True), ([None, 1.0], True),
     ([0.1 + 0.2, 0.3], True), ([0.3, 0.301], False), ([1e6, 1e6 + 1], False)],
)  # fmt: skip
def test_a_group_has_zero_advantage_if_its_usable_rewards_are_numerically_equal(
    scores: list[Any], alike: bool
) -> None:
    assert scores_alike(group("a", scores)) is alike


def test_dynamic_sampling_keeps_accuracies_between_0_and_1_and_counts() -> None:
    keep = DynamicSampling(max_rounds=3)
    kept = keep([group("all", [1, 1]), group("none", [0, 0]), group("some", [1, 0])])
    assert names(kept) == ["some"] and keep.max_rounds == 3 and not keep.whole_step
    assert names(keep([group("more", [0, 1])])) == ["more"]
    assert keep.report() == {"sampling_rounds": 2, "groups_replaced": 2}
    assert keep.report() == {"sampling_rounds": 0, "groups_replaced": 0}


def test_dynamic_sampling_may_go_by_accuracy_where_a_length_penalty_tells_returns_apart() -> None:
    right = group("right", [1.0, 0.6])
    for one in right.trajectories:
        one.metrics["accuracy"] = 1.0
    assert names(DynamicSampling()([right])) == ["right"]
    assert DynamicSampling(metric="accuracy")([right]) == []


def test_zero_advantage_leaves_groups_out_without_asking_for_more_and_never_all() -> None:
    drop = ZeroAdvantage()
    assert drop.whole_step
    assert names(drop([group("a", [1, 1]), group("b", [1, 0]), group("c", [0])])) == ["b"]
    assert names(drop([group("a", [1, 1]), group("c", [0, 0])])) == ["a"]
    assert names(drop([group("lost", [None, None]), group("a", [1, 1])])) == ["a"]
    assert names(drop([group("lost", [None, None])])) == ["lost"]
    assert drop.report() == {"groups_left_out": 4}


@pytest.mark.parametrize("drop", [DynamicSampling(), ZeroAdvantage()])
def test_leaving_groups_out_leaves_the_advantages_of_the_others_alone(drop: Filter) -> None:
    groups = [group("a", [1, 0, 0]), group("b", [1, 1, 1]), group("c", [0, 1, 1])]
    before = grpo(make_batch([one for some in groups for one in some.trajectories])).tolist()
    after = grpo(make_batch([one for some in drop(groups) for one in some.trajectories])).tolist()
    assert after == before[:3] + before[6:] and before[3:6] == [0, 0, 0]


def test_an_overlong_attempt_is_out_of_the_loss_and_in_the_baseline() -> None:
    cut = group("a", [1.0, 0.0, 0.0])
    cut.trajectories[1].stop = StopReason.MAX_TOKENS
    cut.trajectories[2].stop = StopReason.MAX_TURNS
    mask = OverlongFilter()
    (made,) = mask([cut])
    batch = make_batch(made.trajectories)
    assert batch.loss_mask.any(dim=1).tolist() == [True, False, True]
    assert torch.equal(grpo(batch), grpo(make_batch(cut.trajectories)))  # 1/3 is still the mean
    assert mask.report() == {"attempts_masked": 1}
    assert cut.trajectories[1].segments[0].loss_mask.any()  # what was sampled is not written to


def test_a_later_filter_leaves_an_overlong_attempt_out_of_the_baseline() -> None:
    cut = group("a", [0.0, 0.25, 0.5])
    cut.trajectories[2].stop = StopReason.MAX_TOKENS
    pool = SuccessPool(seed=0, mode="add")
    pool([group("a", [1.0])])
    (made,) = pool(OverlongFilter(baseline=False)([cut]))
    assert rewards(made) == [0.0, 0.25, 0.5, 1.0]
    assert [one.group_stats[1] for one in made.trajectories] == pytest.approx(
        [1.25 / 3] * 2 + [0.25, 1.25 / 3]
    )


def test_an_overlong_attempt_may_be_out_of_the_baseline_too() -> None:
    cut = group("a", [1.0, 0.0, 0.5])
    cut.trajectories[1].stop = StopReason.MAX_TOKENS
    cut.trajectories[2].stop = StopReason.MAX_TURNS
    (made,) = OverlongFilter(limits=("max_tokens",), baseline=False)([cut])
    assert made.trajectories[0].group_stats == (2, 0.75, pytest.approx(0.125**0.5))
    (made,) = OverlongFilter(limits=("max_tokens", "max_turns"), baseline=False)([cut])
    assert made.trajectories[0].group_stats == (1, 1.0, 0.0)
    assert not make_batch(made.trajectories).loss_mask[1:].any()
    assert cut.trajectories[0].group_stats == (3, 0.5, 0.5)


def filled(mode: Any = "replace", **options: Any) -> SuccessPool:
    pool = SuccessPool(seed=0, mode=mode, **options)
    pool([group("a", [1, 0]), group("b", [0, 0])])
    pool.report()
    return pool


def test_a_group_that_failed_whole_gets_one_success_in_place_of_a_failure() -> None:
    """Mobile-Agent-v3 (spec 13): [0, 0, 0, 1] -> -.577349 three times and 1.732047 with the population's std."""
    pool = filled()
    (made,) = pool([group("a", [0, 0, 0, 0], version=5)])
    assert (
        sorted(rewards(made)) == [0, 0, 0, 1]
        and len({one.attempt for one in made.trajectories}) == 4
    )
    (success,) = [one for one in made.trajectories if one.source == "replay"]
    assert success.segments[0].versions.max() == 0 and success.group_id == made.id
    batch = make_batch(made.trajectories)
    assert sorted(grpo(batch, std="population").tolist()) == pytest.approx(
        [-0.577349] * 3 + [1.732047], abs=1e-6
    )
    assert bool(batch.logprobs_known.all())  # of the policy that sampled it
    assert pool.report() == {"groups_failed": 1, "groups_rescued": 1, "pool_size": 1}


def test_or_beside_the_failures() -> None:
    """DART (spec 11): [0] * 8 -> 9 trajectories with a variance; any success leaves the group alone."""
    pool = filled("add", recompute=True)
    (made,) = pool([group("a", [0] * 8)])
    assert rewards(made) == [0] * 8 + [1] and made.trajectories[8].attempt == 8
    size, mean, std = made.trajectories[0].group_stats or (0, 0, 0)
    assert size == 9 and mean == pytest.approx(1 / 9) and std == pytest.approx(1 / 3)
    assert make_batch(made.trajectories).logprobs_known.tolist() == [True] * 8 + [False]
    some = group("a", [0, 1])
    assert pool([some])[0] is some


def test_without_a_stored_success_and_without_a_usable_attempt_a_group_stays_as_it_is() -> None:
    pool = filled()
    failed, lost = group("b", [0, 0]), group("a", [None, None])
    assert pool([failed, lost])[0] is failed and pool([lost])[0] is lost
    assert pool.report()["groups_rescued"] == 0


def test_an_aborted_attempt_is_not_the_failure_that_is_replaced() -> None:
    for seed in range(8):
        pool = SuccessPool(seed=seed)
        pool([group("a", [1, 0])])
        (made,) = pool([group("a", [None, 0, None])])
        assert [one.source for one in made.trajectories] == ["local", "replay", "local"]
        assert made.trajectories[1].group_stats == (1, 1.0, 0.0)


def test_the_pool_keeps_the_newest_and_no_replayed_ones() -> None:
    pool = SuccessPool(seed=0, per_task=2, capacity=3)
    for version in range(3):
        pool([group("a", [1, 0], version=version)])
    pool([group("a", [0, 0], version=9)])  # the success that comes in is not stored again
    assert [one.id for one in pool._pool] == ["a/0/1", "a/0/2"]
    pool([group("b", [1, 0]), group("c", [1, 0])])
    assert [one.id for one in pool._pool] == ["a/0/2", "b/0/0", "c/0/0"]


def test_a_restored_pool_makes_the_same_choices(tmp_path: Path) -> None:
    def steps(pool: SuccessPool, begin: int, end: int) -> list[list[str]]:
        made = [
            pool([group("a", [0] * 4, step), group("b", [step % 2, 0], step)])
            for step in range(begin, end)
        ]
        return [[one.id for some in groups for one in some.trajectories] for groups in made]

    def new() -> SuccessPool:
        pool = SuccessPool(seed=3)
        pool([group("a", [1, 1, 1, 1], version) for version in range(4)])
        return pool

    whole = new()
    expected = steps(whole, 0, 9)
    first = new()
    begun = steps(first, 0, 4)
    second = SuccessPool(seed=3)
    second.load_state_dict(through_a_checkpoint(first.state_dict(), tmp_path))
    assert begun + steps(second, 4, 9) == expected
    assert len({json.dumps(step) for step in expected}) > 1


def test_replay_adds_earlier_groups_as_they_were() -> None:
    again = Replay(seed=0, groups=2, capacity=3)
    assert names(again([group("a", [1, 0]), group("flat", [1, 1])])) == ["a", "flat"]
    step = again([group("b", [0, 1], version=1)])
    assert names(step) == ["b", "a"] and {one.source for one in step[1].trajectories} == {"replay"}
    first = step[1].trajectories[0]
    assert (
        first.group_stats == (2, 0.5, pytest.approx(0.5**0.5))
        and first.segments[0].logprobs is not None
    )
    assert again.report() == {"groups_replayed": 1, "groups_stale": 0, "replay_size": 2}
    ids = [
        one.id
        for number in range(5)
        for some in again([group("c", [0, 1], 2 + number)])
        for one in some.trajectories
    ]
    assert len(ids) == len(set(ids)) == 5 * 6 and again.report()["replay_size"] == 3


def test_replay_drops_what_is_too_old() -> None:
    """V - v > 8 goes: of versions 3 and 5 at V = 13, the former (spec 1.2)."""
    again = Replay(seed=0, groups=9, max_staleness=8)
    again([group("b", [1, 0], 3), group("e", [1, 0], 5)])
    assert names(again([group("new", [1, 0], 13)])) == ["new", "e"]
    assert again.report()["groups_stale"] == 1


def test_a_restored_buffer_replays_the_same(tmp_path: Path) -> None:
    def steps(again: Replay, begin: int, end: int) -> list[str]:
        made = [
            again([group(f"t{step}", [1, 0], step), group(f"u{step}", [0, 1], step)])
            for step in range(begin, end)
        ]
        return [one.id for groups in made for some in groups for one in some.trajectories]

    expected = steps(Replay(seed=1, groups=2, capacity=6), 0, 8)
    first, second = Replay(seed=1, groups=2, capacity=6), Replay(seed=1, groups=2, capacity=6)
    begun = steps(first, 0, 5)
    second.load_state_dict(through_a_checkpoint(first.state_dict(), tmp_path))
    assert begun + steps(second, 5, 8) == expected
