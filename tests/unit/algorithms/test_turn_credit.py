"""Credit for turns against hand arithmetic, across segments."""

from __future__ import annotations

import math

import pytest
import torch

from rlflow.algorithms.advantages.turns import step_grpo, turn_returns
from rlflow.types import Batch
from tests.unit.algorithms.batches import Said, Tried, batch_of


def two_attempts(new_segment: bool = False) -> Batch:
    """Rewards by turn: 0, 0, 1 in turns of 1, 2 and 1 tokens, and .5 in one of 3."""
    turns = [
        Said(1, 0.0),
        Said(2, 0.0, new_segment=new_segment),
        Said(1, 1.0, new_segment=new_segment),
    ]
    return batch_of([Tried(turns), Tried([Said(3, 0.5)])])


def on_turns(values: torch.Tensor, batch: Batch) -> list[float]:
    """One number per turn, trajectory by trajectory; zeros elsewhere."""
    assert values.dtype == torch.float32 and not values[~batch.loss_mask].any()
    found = {}
    for row, column in batch.loss_mask.nonzero().tolist():
        key = int(batch.trajectory[row]), int(batch.turn[row, column])
        assert found.setdefault(key, float(values[row, column])) == float(values[row, column])
    return [found[key] for key in sorted(found)]


@pytest.mark.parametrize("new_segment", [False, True])
def test_returns_to_go_are_compared_with_all_turns_of_the_group(new_segment):
    """gamma .5: returns .25, .5, 1 and .5; mean .5625, sample std sqrt(.296875 / 3)."""
    batch = two_attempts(new_segment)
    std = math.sqrt((0.3125**2 + 2 * 0.0625**2 + 0.4375**2) / 3)
    expected = [(value - 0.5625) / (std + 1e-6) for value in (0.25, 0.5, 1.0, 0.5)]
    assert on_turns(turn_returns(batch, gamma=0.5), batch) == pytest.approx(expected, abs=1e-6)
    centred = on_turns(turn_returns(batch, gamma=0.5, std="none"), batch)
    assert centred == pytest.approx([-0.3125, -0.0625, 0.4375, -0.0625], abs=1e-6)


def test_the_same_turns_are_compared_and_one_that_only_one_attempt_has_teaches_nothing():
    batch = two_attempts()
    found = on_turns(turn_returns(batch, gamma=0.5, std="none", compare="same"), batch)
    assert found == pytest.approx([0.25 - 0.375, 0.0, 0.0, 0.5 - 0.375], abs=1e-6)


def test_a_turn_is_not_paid_for_what_came_before_it():
    early = batch_of([Tried([Said(2, 1.0), Said(2, 0.0)]), Tried([Said(2, 0.0), Said(2, 0.0)])])
    found = on_turns(turn_returns(early, std="none"), early)
    assert found == pytest.approx([0.75, -0.25, -0.25, -0.25])


@pytest.mark.parametrize("new_segment", [False, True])
def test_steps_count_as_often_as_an_attempt_has_them(new_segment):
    """One step with reward 1, three with reward 0: the mean is .25, not .5."""
    turns = [Said(2), Said(1, new_segment=new_segment), Said(4)]
    batch = batch_of([Tried([Said(2, 1.0)]), Tried(turns)])
    assert on_turns(step_grpo(batch, std="none"), batch) == pytest.approx(
        [0.75, -0.25, -0.25, -0.25]
    )
    assert on_turns(step_grpo(batch, std="population"), batch) == pytest.approx(
        [1.732047] + [-0.577349] * 3, abs=1e-6
    )


def test_with_one_turn_each_it_is_credit_of_attempts():
    rewards = [0.3, 1.0, -0.5, 0.9]
    batch = batch_of(rewards, [1.0, 0.0])
    from rlflow.algorithms import grpo

    expected = grpo(batch)[:, None] * batch.loss_mask
    for found in (
        turn_returns(batch),
        step_grpo(batch),
        turn_returns(batch, gamma=0.1, compare="same"),
    ):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_groups_do_not_mix():
    one, other = (
        [Tried([Said(1, 1.0), Said(1, 0.0)]), 0.0],
        [5.0, Tried([Said(1, 7.0), Said(2, 2.0)])],
    )
    together, first, second = batch_of(one, other), batch_of(one), batch_of(other)
    for method in (turn_returns, step_grpo):
        apart = on_turns(method(first), first) + on_turns(method(second), second)
        assert on_turns(method(together), together) == pytest.approx(apart, abs=1e-6)
