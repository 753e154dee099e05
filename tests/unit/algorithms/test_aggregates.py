"""Token weights against hand arithmetic: sum(weights * loss) is the aggregation named."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlflow.algorithms.aggregates.means import trajectory_mean
from rlflow.components import AGGREGATE
from rlflow.errors import ConfigError
from rlflow.types import Batch
from tests.unit.algorithms.batches import Said, Tried
from tests.unit.algorithms.batches import batch_of as made_of


def batch_of(tokens_per_row: list[int], owners: list[int] | None = None, width: int = 8) -> Batch:
    mask = torch.arange(width) < torch.tensor(tokens_per_row)[:, None]
    zeros = torch.zeros(mask.shape)
    return Batch(
        tokens=zeros.long(),
        loss_mask=mask,
        logprobs=zeros,
        advantages=zeros,
        weights=zeros,
        lengths=torch.full((len(tokens_per_row),), width),
        temperatures=torch.ones(len(tokens_per_row)),
        trajectory=None if owners is None else torch.tensor(owners),
    )


def token_weights(batch: Batch, how: str, constant: int = 8) -> Tensor:
    """The weights of the named aggregate, as a run makes them."""
    return AGGREGATE.build(how, tokens=constant)(batch)


MEANS = ["token_mean", "sequence_mean", "trajectory_mean"]


@pytest.mark.parametrize(
    ("how", "expected"), [("token_mean", 4 / 6), ("sequence_mean", 0.75), ("constant", 0.25)]
)
def test_two_rows_of_two_and_four_tokens(how, expected):
    batch = batch_of([2, 4])
    loss = torch.tensor([[1.0] * 8, [0.5] * 8])
    weights = token_weights(batch, how, constant=8)
    assert float((weights * loss).sum()) == pytest.approx(expected, abs=1e-6)


def test_a_trajectory_of_two_rows_counts_as_one():
    """RLinf's group, agent and turn scales: turns of 10 and 30 tokens, and one of 20, weigh 0.0125, 0.0125, 0.025 each."""
    weights = token_weights(batch_of([10, 30, 20], owners=[0, 0, 1], width=32), "trajectory_mean")
    assert weights[:, 0].tolist() == pytest.approx([0.0125, 0.0125, 0.025])


def test_a_constant_is_shared_by_trajectories_not_rows():
    weights = token_weights(batch_of([1, 2, 2], owners=[5, 5, 9]), "constant", constant=10)
    assert weights[:, 0].tolist() == pytest.approx([1 / 20] * 3)


@pytest.mark.parametrize("how", MEANS)
def test_weights_sum_to_one_and_are_zero_off_the_mask(how):
    batch = batch_of([3, 0, 8, 1], owners=[0, 1, 2, 0])
    weights = token_weights(batch, how)
    assert float(weights.sum()) == pytest.approx(1.0, abs=1e-6)
    assert not weights[~batch.loss_mask].any()
    assert weights[batch.loss_mask].min() > 0


@pytest.mark.parametrize("how", [*MEANS, "constant"])
@pytest.mark.parametrize("rows", [[0, 0], []])
def test_a_batch_without_trained_tokens_weighs_nothing(how, rows):
    weights = token_weights(batch_of(rows), how, constant=4)
    assert weights.shape == (len(rows), 8) and not weights.any()


@pytest.mark.parametrize("how", [*MEANS, "constant"])
def test_weights_ignore_padding_and_permute_with_rows(how):
    counts, owners = [3, 5, 1, 2], [0, 1, 1, 2]
    plain = token_weights(batch_of(counts, owners), how, constant=8)
    wide = token_weights(batch_of(counts, owners, width=20), how, constant=8)
    torch.testing.assert_close(wide[:, :8], plain)
    order = [2, 0, 3, 1]
    permuted = batch_of([counts[row] for row in order], [owners[row] for row in order])
    torch.testing.assert_close(token_weights(permuted, how, constant=8), plain[order])


def test_wrong_names_and_a_missing_constant_are_config_errors():
    with pytest.raises(ConfigError, match="Did you mean 'token_mean'"):
        token_weights(batch_of([1]), "token_means")
    with pytest.raises(ConfigError, match="the most tokens"):
        token_weights(batch_of([1]), "constant", constant=0)
    with pytest.raises(ConfigError, match="missing keyword tokens"):
        AGGREGATE.build("constant")


@pytest.mark.parametrize("new_segment", [False, True])
def test_the_mean_over_trajectories_is_rlinfs_three_loss_scales_of_turns(new_segment):
    """rlinf/algorithms/loss_scales.py: every turn is a row, whose mean over its tokens is scaled by group (turns / trajectories),
    agent (1 / turns of the trajectory) and turn (turns of the trajectory * the turn's share of its tokens)."""
    lengths = [[3, 1, 4], [2], [5, 9]]
    batch = made_of(
        [Tried([Said(length, new_segment=new_segment) for length in turns]) for turns in lengths]
    )
    weights = trajectory_mean(batch)
    rows = sum(map(len, lengths))
    for owner, turns in enumerate(lengths):
        for number, length in enumerate(turns):
            group = rows / len(lengths)
            agent = 1 / len(turns)
            turn = len(turns) * length / sum(turns)
            weight = group * agent * turn / (rows * length)
            tokens = (batch.trajectory[:, None] == owner) & (batch.turn == number)
            assert weights[tokens].tolist() == pytest.approx([weight] * length)
