"""Advantages of whole attempts against hand arithmetic, and what all of them have in common."""

from __future__ import annotations

import re
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from rlflow.algorithms.algorithm import make_advantage
from rlflow.errors import RLFlowError
from rlflow.types import Batch, StopReason
from tests.unit.algorithms.batches import Said, Tried, batch_of, split

EVERY = ["grpo", "rloo", "reinforce", "reinforce_pp", "running", "maxrl", "gdpo", "turn_returns", "step_grpo",
         {"name": "reinforce", "baseline": "running"}, {"name": "reinforce_pp", "baseline": "group"},
         {"name": "grpo", "std": "none"}, {"name": "grpo", "std": "population"}]  # fmt: skip
CENTRED = [one for one in EVERY if one != "maxrl" and one != "gdpo"]


def advantage(component: Any, batch: Batch) -> Tensor:
    return make_advantage(component)(batch)


def by_attempt(values: Tensor, batch: Batch) -> list[float]:
    """One number per trajectory: all of its rows, and all of its trained tokens, must have the same."""
    if values.dim() == 2:
        values = torch.stack(
            [values[row][batch.loss_mask[row]].unique().squeeze() for row in range(len(batch))]
        )
    assert values.dtype == torch.float32
    found = [values[batch.trajectory == owner].unique() for owner in batch.trajectory.unique()]
    assert all(len(one) == 1 for one in found)
    return [float(one) for one in found]


@pytest.mark.parametrize(
    ("component", "rewards", "expected"),
    [
        ("grpo", [1, 0, 0, 0], [1.499997, -0.499999, -0.499999, -0.499999]),
        (
            {"name": "grpo", "std": "population"},
            [1, 0, 0, 0],
            [1.732047, -0.577349, -0.577349, -0.577349],
        ),
        ({"name": "grpo", "std": "none"}, [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        ("rloo", [1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
        ("reinforce", [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        ({"name": "reinforce", "baseline": "none"}, [1, 0, 0, -2], [1, 0, 0, -2]),
        ("maxrl", [1, 0, 0, 0], [3, -1, -1, -1]),
        ("maxrl", [1, 1, 1, 0], [1 / 3, 1 / 3, 1 / 3, -1]),
        ("running", [1, 1, 0, -0.5], [0.962249, 0.962249, -0.577349, -1.347149]),
        ("running", [0, 0, 0, 1], [-0.577349, -0.577349, -0.577349, 1.732047]),
    ],
)
def test_one_group_by_hand(component, rewards, expected):
    """Also where the first attempt is in three segments."""
    rewards = [float(reward) for reward in rewards]
    for attempts in (rewards, split(rewards)):
        batch = batch_of(attempts)
        assert by_attempt(advantage(component, batch), batch) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {1: 0.774597, 0: -1.290994}),
        ({"baseline": "group"}, {0.5: 1.069045, -0.5: -1.069045, 0.25: 0.534522, -0.75: -1.603567}),
    ],
)
def test_normalisation_over_the_batch_of_two_groups(options, expected):
    groups = [[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0]]
    for first in (groups[0], split(groups[0])):
        batch = batch_of(first, groups[1])
        found = by_attempt(advantage({"name": "reinforce_pp", **options}, batch), batch)
        baselines = [0.5 if options else 0] * 4 + [0.75 if options else 0] * 4
        centred = [
            reward - baseline
            for reward, baseline in zip(groups[0] + groups[1], baselines, strict=True)
        ]
        assert found == pytest.approx([expected[value] for value in centred], abs=1e-6)


def test_normalisation_over_tokens_counts_long_attempts_more():
    """Rewards 1 with 1 token and 0 with 3: mean .25, population std sqrt(.1875)."""
    batch = batch_of([Tried([Said(1, 1.0)]), Tried([Said(3, 0.0)])])
    for baseline, mean in (
        ("none", 0.25),
        ("group", 0.25),
    ):  # the group's baseline is subtracted and added again
        found = advantage({"name": "reinforce_pp", "baseline": baseline, "over": "tokens"}, batch)
        assert by_attempt(found, batch) == pytest.approx(
            [(1 - mean) / 0.1875**0.5, -mean / 0.1875**0.5], abs=1e-6
        )


def test_discounted_returns_to_go_run_across_segments():
    """One attempt, tokens of 1 then 2 in another segment, reward 1 at its end, gamma .5: returns .25, .5, 1; mean 7/12."""
    batch = batch_of([Tried([Said(1), Said(2, 1.0, new_segment=True)])])
    found = advantage({"name": "reinforce_pp", "gamma": 0.5}, batch)
    returns = torch.tensor([0.25, 0.5, 1.0], dtype=torch.float64)
    expected = (returns - returns.mean()) / returns.std(correction=0)
    torch.testing.assert_close(found[batch.loss_mask], expected.float(), atol=1e-6, rtol=0)


def named(values: dict[str, list[float]]) -> Batch:
    count = len(next(iter(values.values())))
    return batch_of(
        [
            Tried([Said()], {name: value[place] for name, value in values.items()})
            for place in range(count)
        ]
    )


def test_several_rewards_are_normalised_one_by_one():
    batch = named({"a": [1, 1, 0, 0], "b": [0, 1, 1, 1]})
    found = advantage({"name": "gdpo", "whiten": False}, batch)
    assert found.tolist() == pytest.approx([-0.633973, 1.366023, -0.366025, -0.366025], abs=2e-6)
    raw = torch.tensor(
        [
            -0.75 / 0.5 + 0.5 / (1 / 3) ** 0.5,
            0.5 + 0.5 * 3**0.5,
            0.5 - 0.5 * 3**0.5,
            0.5 - 0.5 * 3**0.5,
        ]
    )
    whole = advantage("gdpo", batch)
    torch.testing.assert_close(whole, raw / raw.std(correction=0), atol=5e-6, rtol=0)
    weighted = advantage({"name": "gdpo", "weights": {"b": 2.0}, "whiten": False}, batch)
    assert weighted.tolist() == pytest.approx([-3, 1, 1, 1], abs=1e-5)


def test_a_named_reward_that_an_attempt_never_got_is_0_and_one_that_no_other_group_knows_teaches_it_nothing():
    batch = batch_of(
        [Tried([Said()], {"a": 1.0}), Tried([Said()])],
        [Tried([Said()], {"b": 5.0}), Tried([Said()], {"b": 5.0})],
    )
    found = advantage({"name": "gdpo", "whiten": False}, batch)
    assert found.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5), 0, 0], abs=1e-5)


def test_a_named_reward_that_does_not_occur_in_a_step_adds_nothing():
    both = batch_of([Tried([Said()], {"right": 1.0, "rare": 1.0}), Tried([Said()], {"right": 0.0})])
    weighted = {"name": "gdpo", "weights": {"right": 1.0, "rare": 0.5}, "whiten": False}
    for component in (weighted, {"name": "gdpo", "whiten": False}):
        made = make_advantage(component)
        made(both)
        again = make_advantage(component)
        again.load_state_dict(made.state_dict())
        for one in (made, again):
            assert one(named({"right": [1.0, 0.0]})).tolist() == pytest.approx(
                [0.5**0.5, -(0.5**0.5)], abs=1e-5
            )
            assert one(batch_of([1.0, 0.0])).tolist() == [0.0, 0.0]
    assert advantage(weighted, batch_of([1.0, 0.0])).tolist() == [0.0, 0.0]


def test_named_rewards_that_are_missing_from_the_start_are_named(caplog):
    with pytest.raises(RLFlowError, match=r"no named rewards; expected Step.rewards"):
        advantage("gdpo", batch_of([1.0, 0.0]))
    made = make_advantage({"name": "gdpo", "weights": {"formt": 1.0}})
    for _ in range(2):
        made(named({"format": [1.0, 0.0]}))
    (told,) = caplog.messages
    assert re.search(r"no reward 'formt' in this step, only format; .*Did you mean 'format'", told)


def test_the_running_baseline_lags_one_step_and_is_remembered():
    made = make_advantage({"name": "reinforce", "baseline": "running", "decay": 0.9})
    assert made(batch_of(split([1.0, 0.0]))).tolist() == [
        0.5,
        0.5,
        0.5,
        -0.5,
    ]  # the first step's own mean
    assert made(batch_of([1.0])).tolist() == [0.5]
    again = make_advantage({"name": "reinforce", "baseline": "running", "decay": 0.9})
    again.load_state_dict(made.state_dict())
    for one in (made, again):
        assert one(batch_of([1.0])).tolist() == pytest.approx([1 - (0.9 * 0.5 + 0.1 * 1.0)])


def test_running_statistics_of_two_steps_are_those_of_their_union():
    first, second = [1.0, 1.0, 0.0, -0.5], [0.25, 1.0, 3.0]
    made = make_advantage("running")
    made(batch_of(split(first)))
    again = make_advantage("running")
    again.load_state_dict(made.state_dict())
    union = first + second
    expected = [
        (value - statistics.fmean(union)) / (statistics.pstdev(union) + 1e-6) for value in second
    ]
    for one in (made, again):
        assert one(batch_of(second)).tolist() == pytest.approx(expected, abs=1e-6)
    assert made.state_dict()["count"] == 7


def test_decay_forgets_older_steps():
    """Decay .5: after [0, 0] and [1, 1] the weights of the four are .5, .5, 1, 1: mean 2/3, variance 2/9."""
    made = make_advantage({"name": "running", "decay": 0.5})
    made(batch_of([0.0, 0.0]))
    assert made(batch_of([1.0, 1.0])).tolist() == pytest.approx(
        [(1 / 3) / (2 / 9) ** 0.5] * 2, abs=1e-5
    )


@pytest.mark.parametrize("component", ["grpo", "rloo", "reinforce", "maxrl", "gdpo", "turn_returns", "step_grpo",
                                       {"name": "reinforce_pp", "baseline": "group"}], ids=str)  # fmt: skip
def test_a_group_without_a_difference_stays_at_exactly_0_beside_others_that_have_one(component):
    groups = [[0.1, 0.7, 0.3], [0.7] * 5, [1 / 3, 0.9, 0.2, 0.6]]
    batch = batch_of(*[[Tried([Said(2, r)], {"a": r}) for r in group] for group in groups])
    found = advantage(component, batch)
    assert not found[3:8].any() and found[:3].any() and found[8:].any()


@pytest.mark.parametrize("component", EVERY, ids=str)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3])
def test_equal_rewards_and_groups_of_one_teach_exactly_nothing(component, reward):
    tried = Tried([Said(reward=reward)], {"a": reward})
    for groups in ([[tried] * 7, [tried]], [[tried]], [[tried] * 101]):
        batch = batch_of(*groups)
        assert not advantage(component, batch).any()


@pytest.mark.parametrize("component", [*EVERY, {"name": "reinforce", "baseline": "none"}], ids=str)
def test_empty_responses_and_aborted_attempts_leave_everything_finite(component):
    silent, aborted = (
        Tried([Said(0, 0.25)], {"a": 1.0}),
        Tried([Said(2, 0.0)], stop=StopReason.ABORTED),
    )
    for groups in ([[silent, 1.0, 0.0, aborted]], [[silent, aborted]], [[silent, silent]]):
        batch = batch_of(
            *(
                [Tried([Said(2, one)], {"a": one}) if isinstance(one, float) else one for one in g]
                for g in groups
            )
        )
        found = advantage(component, batch)
        assert found.shape[0] == len(batch) and torch.isfinite(found).all()


@pytest.mark.parametrize("component", EVERY, ids=str)
def test_rows_may_stand_in_any_order(component):
    groups = [split([0.3, 1.0, 0.5]), [Tried([Said(1, 0.5), Said(4, 0.25)]), 0.0, 2.0]]
    for group in groups:
        for place, one in enumerate(group):
            group[place] = one if isinstance(one, Tried) else Tried([Said(2, one)])
            group[place].rewards = {"a": float(place)}
    batch = batch_of(*groups)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(
        advantage(component, batch.select(order)),
        advantage(component, batch)[order],
        atol=1e-6,
        rtol=0,
    )


@pytest.mark.parametrize("component", CENTRED, ids=str)
def test_a_shift_of_all_rewards_changes_nothing(component):
    groups, moved = [[0.3, 1.0, -0.5, 0.9], [0.0, 1.0, 1.0, 0.5]], 1000.0
    plain = advantage(component, batch_of(*groups))
    shifted = advantage(
        component, batch_of(*([reward + moved for reward in group] for group in groups))
    )
    torch.testing.assert_close(shifted, plain, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "component", ["grpo", "reinforce_pp", "running", "turn_returns", "step_grpo", "maxrl"]
)
def test_a_scale_of_all_rewards_changes_nothing(component):
    rewards = [0.3, 1.0, 0.5, 0.9]
    plain = advantage(component, batch_of(rewards))
    torch.testing.assert_close(
        advantage(component, batch_of([50 * reward for reward in rewards])),
        plain,
        atol=1e-4,
        rtol=0,
    )


@pytest.mark.parametrize(
    "component", ["grpo", "rloo", "reinforce", "maxrl", {"name": "gdpo", "whiten": False}], ids=str
)
def test_what_is_dropped_later_leaves_the_others_as_they_are(component):
    """Statistics were stamped while the groups were whole."""
    batch = batch_of(
        *[
            [Tried([Said(2, r)], {"a": r}) for r in group]
            for group in ([1.0, 0, 0, 0], [1.0, 1, 0, 0])
        ]
    )
    kept = [1, 4, 7]
    torch.testing.assert_close(
        advantage(component, batch.select(kept)), advantage(component, batch)[kept]
    )


@pytest.mark.parametrize("component", EVERY, ids=str)
@pytest.mark.parametrize("size", [1e-12, 1e12, 1e18])
def test_tiny_and_huge_rewards_stay_finite(component, size):
    rewards = [size, 0.0, size / 3, size / 2]
    assert torch.isfinite(
        advantage(component, batch_of([Tried([Said(2, r)], {"a": r}) for r in rewards]))
    ).all()


def test_a_negative_reward_has_no_logarithm():
    with pytest.raises(RLFlowError, match=r"advantage maxrl: expected rewards from 0, found -0\.5"):
        advantage("maxrl", batch_of([1.0, -0.5]))


@pytest.mark.parametrize(
    "component",
    ["rloo", "maxrl", "reinforce", {"name": "reinforce_pp", "baseline": "group"}],
    ids=str,
)
def test_missing_group_statistics_are_named(component):
    batch = batch_of([1.0, 0.0])
    batch.group_size = torch.tensor([2, 0])
    with pytest.raises(
        RLFlowError, match=r"advantage \w+: 1 of 2 rows \(first: row 1\) lack group statistics"
    ):
        advantage(component, batch)
