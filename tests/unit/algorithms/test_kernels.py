"""Every policy-gradient kernel against the table of values and gradients, closed forms in float64 and finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlflow.algorithms.algorithm import make_loss
from rlflow.algorithms.base import Kernel
from rlflow.algorithms.losses.aipo import AIPOLoss
from rlflow.algorithms.losses.cispo import CISPOLoss
from rlflow.algorithms.losses.gmpo import GMPOLoss
from rlflow.algorithms.losses.gspo import GSPOLoss
from rlflow.algorithms.losses.policy_gradient import ReinforceLoss
from rlflow.algorithms.losses.ppo_clip import PPOClipLoss
from rlflow.algorithms.losses.soft_adaptive import SoftAdaptiveLoss
from rlflow.errors import ConfigError
from rlflow.types import Batch, PolicyOutput
from tests.unit.algorithms.tensors import batch_of, matrix, random_batch

KERNELS: dict[str, Kernel] = {
    "ppo_clip": PPOClipLoss(0.2, 0.28),
    "dual clip": PPOClipLoss(0.2, 0.28, dual_clip=3.0),
    "unclipped": PPOClipLoss(None, None),
    "gspo": GSPOLoss(0.2, 0.28),
    "gspo of tokens": GSPOLoss(0.2, 0.28, level="token"),
    "gmpo": GMPOLoss(),
    "cispo": CISPOLoss(clip_low=0.3),
    "aipo": AIPOLoss(),
    "soft_adaptive": SoftAdaptiveLoss(),
    "reinforce": ReinforceLoss(),
    "ppo_clip on proximal": PPOClipLoss(anchor="proximal"),
    "gspo on proximal": GSPOLoss(0.2, 0.28, anchor="proximal"),
    "gmpo on proximal": GMPOLoss(anchor="proximal"),
    "cispo on proximal": CISPOLoss(anchor="proximal"),
    "aipo on proximal": AIPOLoss(anchor="proximal"),
    "soft_adaptive on proximal": SoftAdaptiveLoss(anchor="proximal"),
}
every_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
OF_ROWS = (GSPOLoss, GMPOLoss)


def gradient(kernel: Kernel, batch: Batch, logprobs: Tensor) -> tuple[float, Tensor]:
    """sum(weights * loss) and its gradient."""
    logprobs = logprobs.clone().requires_grad_()
    total = (batch.weights * kernel(PolicyOutput(logprobs), batch)[0]).sum()
    total.backward()
    assert logprobs.grad is not None
    return float(total.detach()), logprobs.grad


def one_token(
    kernel: Kernel, ratio: float, advantage: float, current: float = -1.5
) -> tuple[float, float]:
    """(K, dK/dlog-prob) at a ratio."""
    total, slope = gradient(
        kernel, batch_of([current - math.log(ratio)], [advantage]), matrix([current])
    )
    return -total, -float(slope)


@pytest.mark.parametrize(
    ("ratio", "advantage", "cispo", "aipo", "soft", "soft_slope"),
    [
        (0.5, 1, 0.5, 0.5, 1.5102, 0.4700),
        (0.5, -1, -0.5, -0.5, -1.4159, -0.4671),
        (1.0, 1, 1.0, 1.0, 2.0, 1.0),
        (1.0, -1, -1.0, -1.0, -1.9048, -1.0),
        (1.5, 1, 1.28, 1.5, 2.4898, 1.4100),
        (1.5, -1, -1.28, -1.5, -2.3936, -1.4012),
        (3.0, 1, 1.28, 2.0, 3.5232, 1.2599),
        (3.0, -1, -1.28, -2.0, -3.3939, -1.1663),
    ],
)
def test_values_and_gradients_by_ratio_and_sign(ratio, advantage, cispo, aipo, soft, soft_slope):
    """ppo_clip's are in test_losses."""
    assert one_token(CISPOLoss(), ratio, advantage) == pytest.approx(
        (-1.5 * cispo, cispo), abs=1e-6
    )
    assert one_token(AIPOLoss(), ratio, advantage) == pytest.approx((-1.5 * aipo, aipo), abs=1e-6)
    assert one_token(ReinforceLoss(), ratio, advantage) == pytest.approx(
        (-1.5 * advantage, advantage), abs=1e-6
    )
    assert one_token(PPOClipLoss(None, None), ratio, advantage) == pytest.approx(
        (ratio * advantage,) * 2, abs=1e-6
    )
    assert one_token(SoftAdaptiveLoss(), ratio, advantage) == pytest.approx(
        (soft, soft_slope), abs=5e-5
    )  # printed to 4 digits
    tau = 1.0 if advantage > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    exact = 4 / tau * gate * advantage, 4 * gate * (1 - gate) * ratio * advantage
    assert one_token(SoftAdaptiveLoss(), ratio, advantage) == pytest.approx(exact, abs=1e-12)


@pytest.mark.parametrize(("policy", "coefficient"), [(0.6, 2.0), (0.06, 0.3), (0.2, 1.0)])
@pytest.mark.parametrize("advantage", [0.7, -0.7])
def test_aipo_caps_the_ratio_to_the_rollout_policy_from_above_whatever_the_sign(
    policy, coefficient, advantage
):
    batch = batch_of([math.log(0.2)], [advantage])
    _, slope = gradient(AIPOLoss(max_ratio=2.0), batch, matrix([math.log(policy)]))
    assert -float(slope) == pytest.approx(coefficient * advantage, abs=1e-6)


def test_the_kernel_of_dppo_is_aipo_with_a_ratio_of_20_at_most():
    for policy, coefficient in ((0.05, 5.0), (0.5, 20.0)):
        _, slope = gradient(
            AIPOLoss(max_ratio=20.0), batch_of([math.log(0.01)], [1.0]), matrix([math.log(policy)])
        )
        assert -float(slope) == pytest.approx(coefficient, abs=1e-6)


LOG_RATIOS = [0.1, -0.05, 0.2, 0.15]


def test_gspo_takes_the_geometric_mean_and_shares_its_gradient():
    batch = batch_of([0.0] * 4, [1.0] * 4, aggregate="sequence_mean")
    wide = GSPOLoss(clip_low=0.2, clip_high=0.28)
    total, slope = gradient(wide, batch, matrix(LOG_RATIOS))
    assert -total == pytest.approx(1.105171, abs=1e-6)  # not the arithmetic 1.109909
    torch.testing.assert_close(-slope, torch.full_like(slope, math.exp(0.1) / 4))
    total, slope = gradient(GSPOLoss(), batch, matrix(LOG_RATIOS))
    assert -total == pytest.approx(1.0004, abs=1e-6) and not slope.any()


def test_gspo_of_tokens_has_the_same_value_and_each_token_its_own_gradient():
    """Weights that differ between tokens, as corrections do, stay with their token."""
    batch = batch_of([0.0] * 4, [1.0, 2.0, 1.0, 0.5], coefficients=matrix([1.0, 0.0, 3.0, 1.0]))
    shared, own = (
        gradient(GSPOLoss(0.2, 0.28, level=level), batch, matrix(LOG_RATIOS))
        for level in ("sequence", "token")
    )
    assert own[0] == pytest.approx(shared[0], abs=1e-12)
    torch.testing.assert_close(-own[1], math.exp(0.1) * matrix([1.0, 0.0, 3.0, 0.5]) / 4)


@pytest.mark.parametrize(("advantage", "value"), [(1.0, 1.161834), (-1.0, -1.221403)])
def test_gmpo_clips_the_log_ratio_of_each_token_by_sign(advantage, value):
    batch = batch_of([0.0] * 4, [advantage] * 4, aggregate="sequence_mean")
    total, slope = gradient(GMPOLoss(), batch, matrix([0.1, -0.05, 0.6, 0.15]))
    assert -total == pytest.approx(value, abs=1e-6)
    cut = advantage > 0
    assert bool(slope[0, 2] == 0) == cut and bool(slope[0, [0, 1, 3]].ne(0).all())


@pytest.mark.parametrize("kernel", [GSPOLoss(0.5, 0.5), GMPOLoss()], ids=["gspo", "gmpo"])
def test_what_is_not_trained_does_not_change_the_ratio_of_a_row(kernel):
    mask = torch.tensor([[False, True, True, False, True, True, False]])
    padded = batch_of([[9.0, 0, 0, -7, 0, 0, 3]], [1.0] * 7, mask, aggregate="sequence_mean")
    plain = batch_of([0.0] * 4, [1.0] * 4, aggregate="sequence_mean")
    found = gradient(kernel, padded, matrix([0.0, 0.1, -0.05, 2.0, 0.2, 0.15, 0.0]))
    expected = gradient(kernel, plain, matrix(LOG_RATIOS))
    assert found[0] == pytest.approx(expected[0], abs=1e-12)
    torch.testing.assert_close(found[1][mask], expected[1][0])
    assert not found[1][~mask].any()


@every_kernel
def test_on_policy_the_gradient_is_the_advantage(kernel):
    batch = random_batch(aggregate="sequence_mean")
    batch = batch.replace(proximal_logprobs=batch.logprobs)
    _, slope = gradient(kernel, batch, batch.logprobs)
    torch.testing.assert_close(-slope, batch.weights * batch.advantages)


def surrogate(kernel: Kernel) -> Callable[[PolicyOutput, Batch], Tensor]:
    """(B, T) loss whose plain derivative the kernel's gradient is. Where a weight is under a stop-gradient that is another
    function than the loss: of min(r, c) A, with x = log r, the integral r A below c and (1 + x - log c) c A above it."""
    if isinstance(kernel, AIPOLoss):
        low, high = 0.0, kernel.max_ratio
    elif isinstance(kernel, CISPOLoss):
        low, high = 1 - kernel.clip_low, 1 + kernel.clip_high
    else:
        return lambda output, batch: kernel(output, batch)[0]

    def integral(output: PolicyOutput, batch: Batch) -> Tensor:
        old = batch.proximal_logprobs if kernel.anchor == "proximal" else batch.logprobs
        x = torch.where(batch.loss_mask, output.logprobs - old, 0.0)
        above = (1 + x - math.log(high)) * high
        below = (1 + x - math.log(low)) * low if low else torch.zeros_like(x)
        value = torch.where(x.exp() > high, above, torch.where(x.exp() < low, below, x.exp()))
        return (
            -value
            * batch.advantages
            * batch.loss_mask
            * (1.0 if batch.coefficients is None else batch.coefficients)
        )

    return integral


@every_kernel
@pytest.mark.parametrize("corrected", [False, True])
def test_gradients_are_those_of_finite_differences(kernel, corrected):
    batch = random_batch(seed=3, spread=0.4)
    if corrected:
        batch = batch.replace(
            coefficients=torch.rand(
                batch.tokens.shape, generator=torch.Generator().manual_seed(1)
            ).double()
        )
    start, step = batch.current_logprobs, 1e-6
    loss = surrogate(kernel)
    _, found = gradient(kernel, batch, start)
    expected = torch.zeros_like(start)
    if kernel == KERNELS["gspo of tokens"]:
        x = torch.where(batch.loss_mask, start - batch.logprobs, 0.0)
        ratio = (x.sum(1, keepdim=True) / batch.loss_mask.sum(1, keepdim=True).clamp(min=1)).exp()
        free = torch.where(
            batch.advantages > 0, ratio <= 1.28, ratio >= 0.8
        )  # closed form: s A while it is not clipped
        factor = 1.0 if batch.coefficients is None else batch.coefficients
        expected = -batch.weights * factor * ratio * batch.advantages * free
    else:
        for row, place in batch.loss_mask.nonzero().tolist():
            sides = []
            for sign in (1, -1):
                moved = start.clone()
                moved[row, place] += sign * step
                sides.append(float((batch.weights * loss(PolicyOutput(moved), batch)).sum()))
            expected[row, place] = (sides[0] - sides[1]) / (2 * step)
    torch.testing.assert_close(found, expected, atol=1e-8, rtol=1e-6)
    assert found.abs().max() > 1e-3


@every_kernel
@pytest.mark.parametrize("poison", [50.0, -math.inf, math.nan])
def test_masked_positions_reach_neither_loss_nor_gradient_nor_metrics(kernel, poison):
    clean = random_batch()
    hole = ~clean.loss_mask
    dirty = clean.replace(
        logprobs=clean.logprobs.masked_fill(hole, poison),
        proximal_logprobs=clean.proximal_logprobs.masked_fill(hole, poison),
        advantages=clean.advantages.masked_fill(hole, poison),
    )
    expected = gradient(kernel, clean, clean.current_logprobs)
    found = gradient(kernel, dirty, clean.current_logprobs.masked_fill(hole, poison))
    assert found[0] == pytest.approx(expected[0]) and torch.equal(found[1], expected[1])
    _, metrics = kernel(
        PolicyOutput(clean.current_logprobs.masked_fill(hole, poison).requires_grad_()), dirty
    )
    assert all(value.isfinite().all() and not value.requires_grad for value in metrics.values())


@every_kernel
@pytest.mark.parametrize("distance", [1e4, -1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ratios_beyond_all_numbers_stay_finite(kernel, distance, dtype):
    batch = random_batch().map(
        lambda value: value.to(dtype) if value.is_floating_point() else value
    )
    batch = batch.replace(proximal_logprobs=batch.logprobs)
    for advantages in (batch.advantages, -batch.advantages, torch.zeros_like(batch.advantages)):
        total, slope = gradient(
            kernel, batch.replace(advantages=advantages), batch.logprobs + distance
        )
        assert math.isfinite(total) and slope.isfinite().all()


@every_kernel
def test_without_advantage_nothing_is_lost_or_learnt(kernel):
    batch = random_batch()
    total, slope = gradient(
        kernel, batch.replace(advantages=torch.zeros_like(batch.advantages)), batch.current_logprobs
    )
    assert kernel.vanishes_at_zero_advantage and total == 0 and not slope.any()


@every_kernel
def test_the_order_of_rows_and_micro_batches_changes_nothing(kernel):
    batch = random_batch(aggregate="sequence_mean")
    total, slope = gradient(kernel, batch, batch.current_logprobs)
    parts = [[5, 2], [0], [4, 1, 3]]
    found = [gradient(kernel, batch.select(rows), batch.current_logprobs[rows]) for rows in parts]
    assert sum(value for value, _ in found) == pytest.approx(total, abs=1e-12)
    joined, order = (
        torch.cat([value for _, value in found]),
        [row for rows in parts for row in rows],
    )
    torch.testing.assert_close(joined, slope[order], atol=1e-15, rtol=1e-12)


@every_kernel
def test_a_token_left_out_by_a_correction_of_its_row_has_no_gradient(kernel):
    batch = random_batch()
    keep = torch.ones(batch.tokens.shape, dtype=torch.float64)
    keep[1] = 0
    _, slope = gradient(kernel, batch.replace(coefficients=keep), batch.current_logprobs)
    assert not slope[1].any() and slope[0].any()
    if not isinstance(kernel, OF_ROWS):
        keep = torch.where(
            torch.rand(keep.shape, generator=torch.Generator().manual_seed(2)) < 0.5, keep, 0.0
        )
        _, slope = gradient(kernel, batch.replace(coefficients=keep), batch.current_logprobs)
        assert not slope[keep == 0].any()


def test_the_clip_range_of_a_batch_takes_the_place_of_the_kernels():
    batch = batch_of(
        [0.0] * 3, [1.0] * 3, ratio_low=matrix([0.5, 0.9, 0.0]), ratio_high=matrix([1.5, 1.2, 9.0])
    )
    found = PPOClipLoss()(PolicyOutput(torch.full((1, 3), 1.4).double().log()), batch)[0]
    torch.testing.assert_close(-found, matrix([1.4, 1.2, 1.4]))


@pytest.mark.parametrize(
    ("component", "message"),
    [
        ({"name": "gspo", "level": "row"}, "level: expected one of sequence, token, found 'row'"),
        ({"name": "cispo", "clip_low": 2}, "clip_low: expected a number from 0 to 1"),
        ({"name": "aipo", "max_ratio": 0}, "max_ratio: expected a number above 0"),
        ({"name": "aipo", "anchor": "reference"}, "anchor: expected one of rollout, proximal"),
        ({"name": "soft_adaptive", "tau_positive": -1}, "tau_positive: expected a number above 0"),
        ({"name": "gmpo", "level": "token"}, "unknown keyword 'level'"),
        ({"name": "sft", "coefficient": -1}, "coefficient: expected a number from 0"),
    ],
)
def test_wrong_values_are_config_errors(component, message):
    with pytest.raises(ConfigError, match=message):
        make_loss([component])


def test_kernels_are_made_from_their_names():
    names = ["gspo", "gmpo", "cispo", "aipo", "soft_adaptive", "reinforce"]
    made = make_loss([*names, {"name": "sft", "coefficient": 0.1}])
    assert [type(term).__name__ for term in made.terms][:2] == ["GSPOLoss", "GMPOLoss"]
    assert made.terms[-1].coefficient == 0.1
    value, metrics = made.terms[-1](PolicyOutput(matrix([-2.0])), batch_of([0.0], [1.0]))
    assert float(value) == pytest.approx(0.2) and float(metrics["nll"]) == 2.0
