"""The coefficient that follows the entropy, step by step."""

from __future__ import annotations

import pytest
import torch

from rlflow.algorithms.algorithm import Algorithm, make_advantage, make_loss
from rlflow.algorithms.losses.entropy import EntropyTargetLoss
from rlflow.errors import RLFlowError
from rlflow.types import PolicyOutput
from tests.unit.algorithms.batches import batch_of

BATCH = batch_of([1.0, 0.0])


def gradient(loss: EntropyTargetLoss) -> float:
    """d loss / d entropy of a trained token."""
    entropy = torch.full(BATCH.tokens.shape, 0.3, requires_grad=True)
    loss(PolicyOutput(torch.zeros(BATCH.tokens.shape), entropy), BATCH)[0].sum().backward()
    assert not entropy.grad[~BATCH.loss_mask].any()
    return float(entropy.grad[BATCH.loss_mask].unique())


def test_it_grows_below_the_target_shrinks_above_it_and_counts_only_below():
    loss = EntropyTargetLoss(target=0.2, step=0.01)
    assert gradient(loss) == 0
    for entropy, coefficient, used in ((0.1, 0.01, 0.01), (0.1, 0.02, 0.02), (0.2, 0.02, 0.02), (0.5, 0.01, 0.0),
                                       (0.5, 0.0, 0.0), (0.5, 0.0, 0.0), (0.1, 0.01, 0.01)):  # fmt: skip
        loss.observe({"entropy": entropy})
        assert loss.coefficient == pytest.approx(coefficient)
        assert gradient(loss) == pytest.approx(-used)


def test_it_has_an_upper_limit_and_says_what_it_is():
    loss = EntropyTargetLoss(target=1.0, step=0.4, coefficient=0.5)
    for _ in range(3):
        loss.observe({"entropy": 0.0})
    output = PolicyOutput(torch.zeros(BATCH.tokens.shape), torch.ones(BATCH.tokens.shape))
    assert loss.coefficient == 1.0 and loss(output, BATCH)[1][
        "entropy_coefficient"
    ].unique().tolist() == [1.0]
    with pytest.raises(RLFlowError, match="loss entropy_target: the trainer gave no entropy"):
        loss(PolicyOutput(torch.zeros(BATCH.tokens.shape)), BATCH)


def test_the_algorithm_tells_it_and_keeps_what_it_knows_by_its_place():
    def made() -> Algorithm:
        losses = make_loss([{"name": "ppo_clip"}, {"name": "entropy_target", "target": 0.2}])
        return Algorithm(make_advantage("grpo"), losses, lambda batch: batch.weights)

    algorithm, again = made(), made()
    assert not algorithm.state_dict().get("losses.0")
    algorithm.observe({"entropy": 0.1})
    again.load_state_dict(algorithm.state_dict())
    assert again.loss.terms[1].coefficient == 0.005 and algorithm.state_dict() == again.state_dict()
