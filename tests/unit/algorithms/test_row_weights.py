"""Row weights and the denominator of kept tokens, against hand arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlflow.algorithms.aggregates.means import sequence_mean, token_mean, trajectory_mean
from rlflow.algorithms.transforms.kept_mean import KeptMean
from rlflow.algorithms.transforms.row_weights import duration_weight, size_weight
from rlflow.types import Batch
from tests.unit.algorithms.batches import Said, Tried, batch_of


def weighted(batch: Batch, aggregate=token_mean) -> Batch:
    return batch.replace(weights=aggregate(batch))


def factors(changed: Batch, before: Batch) -> list[float]:
    """What the weight of each row's first trained token was multiplied with."""
    mask = before.loss_mask
    first = mask.double().argmax(dim=1)
    rows = torch.arange(len(before))[mask.any(dim=1)]
    return (changed.weights / before.weights)[rows, first[rows]].tolist()


def durations(*seconds: float) -> Batch:
    return weighted(batch_of([Tried([Said(2, seconds=one)]) for one in seconds]))


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [([1.0, 9.0], [0.2, 1.8]), ([3.0, 3.0], [1.0, 1.0]), ([0.01, 0.1], [1.0, 1.0])],
)
def test_slow_turns_weigh_more(seconds, expected):
    batch = durations(*seconds)
    assert factors(duration_weight(batch), batch) == pytest.approx(expected, abs=1e-6)


def test_what_finishes_more_often_gains_nothing_by_it():
    """In 18 s each of two equally likely actions: nine of 1 s, one of 9 s; both weigh 5 in sum."""
    batch = durations(*[1.0] * 9, 9.0)
    found = factors(duration_weight(batch), batch)
    assert found == pytest.approx([5 / 9] * 9 + [5.0], abs=1e-6)
    assert sum(found[:9]) == pytest.approx(found[9], abs=1e-6)
    assert factors(duration_weight(batch, most=2.0), batch) == pytest.approx(
        [5 / 9] * 9 + [2.0], abs=1e-6
    )


def test_turns_of_one_attempt_have_their_own_durations_and_count_once_whatever_their_tokens():
    batch = weighted(
        batch_of(
            [
                Tried(
                    [
                        Said(1, seconds=1.0),
                        Said(6, seconds=9.0),
                        Said(1, seconds=2.0, new_segment=True),
                    ]
                )
            ]
        )
    )
    factor = (duration_weight(batch).weights / batch.weights)[batch.loss_mask]
    assert factor.tolist() == pytest.approx([1 / 4] + [9 / 4] * 6 + [2 / 4], abs=1e-6)


def test_one_over_steps_makes_attempts_equal_where_tokens_count_alike():
    batch = weighted(
        batch_of([Tried([Said(2), Said(2, new_segment=True), Said(2)]), Tried([Said(2)])])
    )
    changed = size_weight(batch)
    assert float(changed.weights.sum()) == pytest.approx(1.0, abs=1e-6)
    torch.testing.assert_close(changed.weights, trajectory_mean(batch))
    steps = size_weight(batch, power=1.0).weights
    assert float(steps[2].sum() / steps[:2].sum()) == pytest.approx(1 / 9, abs=1e-6)


def test_length_takes_a_mean_over_attempts_to_one_over_tokens_and_back():
    batch = batch_of([Tried([Said(5), Said(2, new_segment=True)]), Tried([Said(1)])])
    over_tokens = size_weight(weighted(batch, trajectory_mean), of="tokens", power=1.0).weights
    torch.testing.assert_close(over_tokens, token_mean(batch))
    torch.testing.assert_close(
        size_weight(weighted(batch), of="tokens", power=-1.0).weights, trajectory_mean(batch)
    )


@pytest.mark.parametrize("change", [duration_weight, size_weight, KeptMean()])
def test_batches_without_a_trained_token_stay_as_they_are(change):
    batch = weighted(batch_of([Tried([Said(0)]), Tried([Said(0)])])).replace(
        coefficients=torch.zeros(2, 1)
    )
    assert not change(batch).weights.any() and torch.isfinite(change(batch).coefficients).all()


@pytest.mark.parametrize(
    ("per", "aggregate"),
    [("batch", token_mean), ("trajectory", trajectory_mean), ("row", sequence_mean)],
)
def test_the_denominator_is_the_kept_tokens(per, aggregate):
    """What the transform gives is the aggregate of the batch whose loss mask has lost the dropped tokens."""
    batch = weighted(
        batch_of([Tried([Said(4), Said(3, new_segment=True)]), Tried([Said(2)]), Tried([Said(5)])]),
        aggregate,
    )
    keep = torch.rand(batch.tokens.shape, generator=torch.Generator().manual_seed(1)) < 0.7
    keep[torch.arange(len(batch)), batch.loss_mask.double().argmax(dim=1)] = (
        True  # one token of each row at least
    )
    loss = torch.randn(
        batch.tokens.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )

    def total(weights: Tensor, coefficients: Tensor) -> float:
        return float((weights * coefficients * loss).sum())

    changed = KeptMean(per)(batch.replace(coefficients=keep.float()))
    expected = aggregate(batch.replace(loss_mask=batch.loss_mask & keep))
    assert torch.equal(changed.weights, batch.weights)  # KL and entropy stay means over all tokens
    assert total(changed.weights, changed.coefficients) == pytest.approx(
        total(expected, keep.double()), abs=1e-6
    )


def test_corrections_keep_their_size_and_units_of_which_nothing_is_kept_stay_away():
    batch = weighted(batch_of([Tried([Said(2)]), Tried([Said(2)])])).replace(
        coefficients=torch.tensor([[1, 2.0, 0], [1, 0, 0]])
    )
    assert KeptMean("row")(batch).coefficients[:, 1:].tolist() == [[4, 0], [0, 0]]
    assert KeptMean("batch")(batch).coefficients[:, 1:].tolist() == [[8, 0], [0, 0]]
    nothing = batch.replace(coefficients=torch.zeros(2, 3))
    assert not KeptMean()(nothing).coefficients.any()
    assert KeptMean()(batch.replace(coefficients=None)).coefficients is None
