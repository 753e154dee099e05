"""The value loss against its closed form, and which terms of a loss are the critic's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlflow.algorithms import EntropyLoss, PPOClipLoss, SumLoss, ValueLoss
from rlflow.algorithms.losses.monitored import Monitored
from rlflow.errors import RLFlowError
from rlflow.types import Batch, FunctionLoss, PolicyOutput


def batch_of(old: Tensor, returns: Tensor, mask: Tensor | None = None) -> Batch:
    mask = torch.ones(old.shape, dtype=torch.bool) if mask is None else mask
    nothing = torch.zeros(old.shape)
    lengths, temperatures = torch.full((len(old),), old.shape[1]), torch.ones(len(old))
    made = Batch(nothing.long(), mask, nothing, nothing, mask.double(), lengths, temperatures)
    return made.replace(values=old, returns=returns)


def output_of(values: Tensor) -> PolicyOutput:
    return PolicyOutput(torch.full_like(values, torch.nan).detach(), values=values)


@pytest.mark.parametrize(
    ("value", "old", "returned", "loss", "gradient", "clipped"),
    [
        (1.0, 1.0, 2.0, 0.5, -1.0, 0),  # no step yet
        (1.2, 1.0, 2.0, 0.32, -0.8, 0),  # within the clip
        (
            1.5,
            1.0,
            2.0,
            0.32,
            0.0,
            1,
        ),  # near the return by more than the clip allows: max(0.125, 0.5 * 0.8^2)
        (0.0, 1.0, 2.0, 2.0, -2.0, 0),  # away from it: the larger error is the free one
        (4.0, 1.0, 2.0, 2.0, 2.0, 0),  # beyond it, and further off than the clipped value is
        (2.5, 1.0, 2.0, 0.32, 0.0, 1),  # beyond it, but nearer
    ],
)
def test_value_gradient_and_clipping_by_hand(
    value: float, old: float, returned: float, loss: float, gradient: float, clipped: int
) -> None:
    """clip 0.2: 0.5 max((V - R)^2, (clip(V) - R)^2), and V - R as the gradient where the first is the larger."""
    values = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    batch = batch_of(
        torch.tensor([[old]], dtype=torch.float64), torch.tensor([[returned]], dtype=torch.float64)
    )
    found, metrics = ValueLoss(clip=0.2, coefficient=3.0)(output_of(values), batch)
    found.sum().backward()
    assert float(found.detach()) == pytest.approx(3 * loss) and float(
        metrics["value_loss"]
    ) == pytest.approx(loss)
    assert (
        float(values.grad) == pytest.approx(3 * gradient)
        and float(metrics["value_clip_fraction"]) == clipped
    )


@pytest.mark.parametrize("clip", [None, 0.3])
def test_the_gradient_is_that_of_finite_differences(clip: float | None) -> None:
    draw = torch.Generator().manual_seed(0)
    values, old, returns = (
        torch.randn(4, 6, generator=draw, dtype=torch.float64) for _ in range(3)
    )
    values.requires_grad_()
    mask = torch.rand(4, 6, generator=draw) < 0.7
    batch = batch_of(old, returns, mask)
    assert torch.autograd.gradcheck(
        lambda v: ValueLoss(clip=clip)(output_of(v), batch)[0].sum(), values
    )


def test_without_a_clip_it_is_half_the_squared_error() -> None:
    draw = torch.Generator().manual_seed(1)
    values, old, returns = (torch.randn(3, 5, generator=draw) for _ in range(3))
    loss, metrics = ValueLoss(clip=None)(output_of(values), batch_of(old, returns))
    torch.testing.assert_close(loss, 0.5 * (values - returns) ** 2)
    assert not bool(metrics["value_clip_fraction"].any())


def test_what_is_not_trained_reaches_neither_loss_nor_gradient() -> None:
    mask = torch.tensor([[True, False]])
    values = torch.tensor([[1.0, float("inf")]], requires_grad=True)
    batch = batch_of(torch.tensor([[1.0, float("nan")]]), torch.tensor([[2.0, float("nan")]]), mask)
    loss, _ = ValueLoss()(output_of(values), batch)
    loss.sum().backward()
    assert loss.tolist() == [[0.5, 0.0]] and values.grad.tolist() == [[-1.0, 0.0]]


def test_importance_corrections_do_not_multiply_it() -> None:
    batch = batch_of(torch.zeros(1, 3), torch.ones(1, 3))
    corrected = batch.replace(coefficients=torch.full((1, 3), 7.0))
    output = output_of(torch.zeros(1, 3))
    assert torch.equal(ValueLoss()(output, corrected)[0], ValueLoss()(output, batch)[0])


def test_a_sum_splits_into_what_the_policy_and_what_the_critic_learn() -> None:
    kernel, bonus, value = PPOClipLoss(), EntropyLoss(0.1), ValueLoss()
    assert Monitored(SumLoss((kernel, value, bonus))).split() == (
        Monitored(SumLoss((kernel, bonus))),
        SumLoss((value,)),
    )
    assert SumLoss((value,)).split() == (None, SumLoss((value,)))
    assert Monitored(kernel).split() == (Monitored(kernel), None)
    plain = FunctionLoss(lambda output, batch: (output.logprobs, {}))
    assert plain.split() == (plain, None) and value.split() == (None, value)


def test_a_missing_critic_or_return_is_said_so() -> None:
    batch = batch_of(torch.zeros(1, 2), torch.zeros(1, 2))
    with pytest.raises(
        RLFlowError, match=r"loss value: the trainer gave no values; set algorithm\.critic"
    ):
        ValueLoss()(PolicyOutput(torch.zeros(1, 2)), batch)
    with pytest.raises(
        RLFlowError, match="loss value: the batch has no returns, expected it from an advantage"
    ):
        ValueLoss()(output_of(torch.zeros(1, 2)), batch.replace(returns=None))
