"""Transforms that say which tokens and turns a minibatch learns from."""

from __future__ import annotations

import numpy
import pytest
import torch

from rlflow.algorithms import token_weights
from rlflow.algorithms.transforms.high_entropy_steps import HighEntropySteps
from rlflow.algorithms.transforms.high_entropy_tokens import HighEntropyTokens, quantile
from rlflow.batching import make_batch
from rlflow.types import Batch, Segment, StopReason, Trajectory, Turn

STEPS = [0.1, 0.4, 0.2, 0.8, 0.5, 0.3, 0.9, 0.7, 0.6, 1.0]
"""Entropies of ten steps; their 20% quantile is .28 (spec 11)."""


def played(name: str, turns: int, tokens: int = 2) -> Trajectory:
    """An attempt of `turns` responses with an observation token after each."""
    length = 1 + turns * (tokens + 1)
    mask = torch.zeros(length, dtype=torch.bool)
    spans = [
        Turn(0, 1 + turn * (tokens + 1), 1 + turn * (tokens + 1) + tokens, 0.0, 0.1)
        for turn in range(turns)
    ]
    for turn in spans:
        mask[turn.start : turn.stop] = True
    segment = Segment(torch.arange(length), mask, torch.zeros(length), torch.where(mask, 0, -1))
    return Trajectory(
        name, name, [segment], spans, 0.0, StopReason.TERMINATED, group_stats=(1, 0.0, 0.0)
    )


def with_entropies(batch: Batch, of_steps: list[list[float]]) -> Batch:
    """Entropies whose means over the turns are these: half the value below and above."""
    entropy = torch.full(batch.tokens.shape, 9.0)  # where nothing is trained, it must not count
    for row, steps in enumerate(of_steps):
        for turn, value in enumerate(steps):
            places = ((batch.turn[row] == turn) & batch.loss_mask[row]).nonzero().flatten()
            entropy[row, places] = value + torch.linspace(-value / 2, value / 2, len(places))
    return batch.replace(current_entropy=entropy, weights=token_weights(batch))


@pytest.mark.parametrize("share", [0.0, 0.2, 0.25, 0.8, 1.0])
def test_the_quantile_is_that_of_numpy(share: float) -> None:
    assert float(quantile(torch.tensor(STEPS), share)) == pytest.approx(
        float(numpy.quantile(STEPS, share)), abs=1e-7
    )


def test_the_turns_of_least_entropy_are_cut_whatever_trajectory_they_are_in() -> None:
    batch = with_entropies(make_batch([played("a", 4), played("a", 6)]), [STEPS[:4], STEPS[4:]])
    kept = HighEntropySteps()(batch).coefficients
    assert kept is not None and kept[batch.loss_mask].mean() == pytest.approx(0.8)
    for row, steps in enumerate([STEPS[:4], STEPS[4:]]):
        for turn, value in enumerate(steps):
            assert bool((kept[row][batch.turn[row] == turn] == float(value >= 0.28)).all())


def test_groups_have_a_quantile_each_unless_the_minibatch_is_meant() -> None:
    batch = with_entropies(
        make_batch([played("a", 5), played("b", 5)]), [[1, 2, 3, 4, 5], [11, 12, 13, 14, 15]]
    )
    each, together = (
        HighEntropySteps(0.2)(batch).coefficients,
        HighEntropySteps(0.5, over="minibatch")(batch).coefficients,
    )
    first, second = ((batch.turn[row] == 0) for row in range(2))
    assert not each[0][first].any() and not each[1][second].any()  # the least of either
    assert not together[0][batch.loss_mask[0]].any() and together[1][batch.loss_mask[1]].all()


def test_selection_depends_neither_on_the_order_of_rows_nor_on_padding() -> None:
    batch = with_entropies(
        make_batch([played("a", 4), played("a", 6), played("b", 3)]),
        [STEPS[:4], STEPS[4:], [0.3, 0.1, 0.2]],
    )
    for part in (HighEntropySteps(), HighEntropyTokens(0.3)):
        whole, mixed = part(batch), part(batch.select([2, 0, 1]))
        for row, source in enumerate([2, 0, 1]):
            length = int(batch.lengths[source])
            for name in ("coefficients", "weights"):
                ours, theirs = getattr(mixed, name), getattr(whole, name)
                assert ours is None or torch.equal(ours[row, :length], theirs[source, :length])


def test_the_tokens_of_highest_entropy_are_kept_and_weights_stay() -> None:
    batch = with_entropies(make_batch([played("a", 1, 10)]), [[1.0]])
    entropy = torch.full_like(batch.weights, 99.0)
    entropy[batch.loss_mask] = torch.tensor(STEPS)
    part = HighEntropyTokens(0.2)
    out = part(batch.replace(current_entropy=entropy))
    assert sorted(entropy[(out.coefficients == 1) & batch.loss_mask].tolist()) == pytest.approx(
        [0.9, 1.0]
    )
    assert torch.equal(out.weights, batch.weights) and out.coefficients.sum() == 2
    again = part(out)  # on top of another correction
    assert torch.equal(again.coefficients, out.coefficients)


@pytest.mark.parametrize("part", [HighEntropySteps(), HighEntropyTokens()])
def test_a_minibatch_without_a_trained_token_stays_as_it_is(
    part: HighEntropySteps | HighEntropyTokens,
) -> None:
    batch = with_entropies(make_batch([played("a", 1)]), [[1.0]])
    batch = batch.replace(loss_mask=torch.zeros_like(batch.loss_mask))
    assert part(batch) is batch
