"""Statistics over trajectories, and tokens in the order sampled, against torch on lists and by hand."""

from __future__ import annotations

import pytest
import torch

from rlflow.algorithms.statistics import (
    first_rows,
    mean_of,
    moments,
    returns_to_go,
    sampled_order,
    token_shares,
    whitened,
)
from tests.unit.algorithms.batches import Said, Tried, batch_of, split


def test_each_trajectory_has_one_row_in_any_order():
    batch = batch_of(split([1.0, 0.0])).select(
        [2, 3, 0, 1]
    )  # three segments, and an attempt of one
    first, place = first_rows(batch)
    assert first.tolist() == [0, 1] and place.tolist() == [0, 1, 0, 0]
    batch.trajectory = None
    assert [one.tolist() for one in first_rows(batch)] == [[0, 1, 2, 3]] * 2


def test_moments_are_those_of_each_set():
    values = torch.tensor([1.0, 5.0, 2.0, 7.0, 4.0, 9.0], dtype=torch.float64)
    sets = torch.tensor([7, 3, 7, 3, 7, 1])
    found = moments(values, sets)
    for number in (7, 3, 1):
        inside = values[sets == number]
        assert found.size[sets == number].tolist() == [len(inside)] * len(inside)
        torch.testing.assert_close(found.mean[sets == number], inside.mean().expand(len(inside)))
        expected = inside.std() if len(inside) > 1 else torch.zeros((), dtype=torch.float64)
        torch.testing.assert_close(found.std[sets == number], expected.expand(len(inside)))


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e17])
def test_equal_values_have_a_deviation_of_exactly_0(value):
    values = torch.full((1001,), value, dtype=torch.float64)
    assert not moments(values, torch.zeros(1001).long()).std.any() and mean_of(values) == value
    assert not whitened(values, torch.rand(1001, generator=torch.Generator().manual_seed(0))).any()


def test_small_differences_of_large_values_survive():
    values = torch.tensor([1e9, 1e9 + 1, 1e9 + 2], dtype=torch.float64)
    torch.testing.assert_close(
        whitened(values, torch.ones(3)),
        torch.tensor([-(1.5**0.5), 0, 1.5**0.5], dtype=torch.float64),
    )
    assert moments(values, torch.zeros(3).long()).std.tolist() == [1.0] * 3


def test_whitened_values_have_mean_0_and_deviation_1_under_their_shares():
    generator = torch.Generator().manual_seed(0)
    values, shares = (
        torch.rand(4, 9, generator=generator) + 3,
        torch.rand(4, 9, generator=generator),
    )
    shares[:, 5:] = 0
    found = whitened(values, shares)
    assert not found[:, 5:].any() and found.dtype == torch.float64
    weights = shares.double() / shares.double().sum()
    assert float((weights * found).sum()) == pytest.approx(0, abs=1e-9)
    assert float((weights * found.square()).sum()) == pytest.approx(1, abs=1e-6)
    assert not whitened(values, torch.zeros(4, 9)).any()


def test_shares_of_tokens_and_of_trajectories():
    batch = batch_of(
        [Tried([Said(1), Said(3, new_segment=True)]), Tried([Said(2)]), Tried([Said(0)])]
    )
    assert token_shares(batch, "tokens")[batch.loss_mask].tolist() == [1.0] * 6
    assert token_shares(batch, "trajectories")[batch.loss_mask].tolist() == [0.25] * 4 + [0.5] * 2


def test_tokens_come_in_the_order_in_which_they_were_sampled():
    batch = batch_of([Tried([Said(1), Said(2, new_segment=True)]), Tried([Said(2)])])
    order = [2, 1, 0]
    row, position, owner = sampled_order(batch.select(order))
    assert [order[one] for one in row.tolist()] == [0, 1, 1, 2, 2]
    assert position.tolist() == [1, 1, 2, 1, 2] and owner.tolist() == [0, 0, 0, 1, 1]


def test_tokens_of_segments_that_take_turns_come_in_the_order_of_the_turns():
    batch = batch_of([Tried([Said(1), Said(2, new_segment=True), Said(1), Said(1)])])
    turn = batch.turn.clone()
    turn[batch.turn == 1], turn[batch.turn == 2] = 2, 1  # the first segment's, in between
    row, position, _ = sampled_order(batch.replace(turn=turn, segment=batch.segment))
    assert turn[row, position].tolist() == [0, 1, 2, 2, 3] and position[2] < position[3]


@pytest.mark.parametrize(
    ("gamma", "expected"),
    [(1.0, [6, 5, 3, 9, 5]), (0.5, [2.75, 3.5, 3, 6.5, 5]), (0.0, [1, 2, 3, 4, 5])],
)
def test_returns_to_go_stop_at_the_end_of_a_trajectory(gamma, expected):
    found = returns_to_go(torch.tensor([1.0, 2, 3, 4, 5]), torch.tensor([0, 0, 0, 1, 1]), gamma)
    assert found.tolist() == expected and found.dtype == torch.float64
    assert returns_to_go(torch.zeros(0), torch.zeros(0).long()).shape == (0,)
