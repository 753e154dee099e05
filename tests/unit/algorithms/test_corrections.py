"""Importance corrections and keep-masks against hand arithmetic, brute force and their invariants."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rlflow.algorithms.base import Transform
from rlflow.algorithms.losses.ppo_clip import PPOClipLoss
from rlflow.algorithms.transforms.decoupled import Decoupled
from rlflow.algorithms.transforms.dppo import DPPO
from rlflow.algorithms.transforms.icepop import IcePop
from rlflow.algorithms.transforms.importance import at_level
from rlflow.algorithms.transforms.kept_mean import KeptMean
from rlflow.algorithms.transforms.kpop import KPop
from rlflow.algorithms.transforms.m2po import M2PO, kept, suffix_range, winsor_range
from rlflow.algorithms.transforms.mis import MaskedImportance
from rlflow.algorithms.transforms.sequence_mask import SequenceMask
from rlflow.algorithms.transforms.tis import TruncatedImportance
from rlflow.components import TRANSFORM
from rlflow.errors import ConfigError, RLFlowError
from rlflow.types import SOURCES, Batch, PolicyOutput
from tests.unit.algorithms.tensors import batch_of, matrix, random_batch

CORRECTIONS: dict[str, Transform] = {
    "tis": TruncatedImportance(1.2),
    "tis of rows": TruncatedImportance(1.2, level="sequence"),
    "mis": MaskedImportance(1.5, 0.6),
    "mis of rows": MaskedImportance(2.0, 0.5, level="sequence"),
    "mis geometric": MaskedImportance(1.1, 0.9, level="geometric"),
    "mis of the largest": MaskedImportance(1.2, level="max", weigh=False),
    "icepop": IcePop(0.7, 1.4),
    "kpop": KPop(0.02),
    "decoupled": Decoupled(cap=1.5),
    "decoupled, clamped": Decoupled(cap=1.5, over="clamp"),
    "decoupled, uncapped": Decoupled(cap=None),
    "decoupled, loglinear": Decoupled(proximal="loglinear"),
    "decoupled, linear": Decoupled(proximal="linear"),
    "dppo": DPPO(low=0.05, high=0.05),
    "dppo by KL": DPPO("kl", 0.01, 0.01),
    "dppo on proximal": DPPO(low=0.05, high=0.05, anchor="proximal"),
    "sequence_mask": SequenceMask(0.01),
    "m2po": M2PO(),
    "m2po over all": M2PO("mask_all"),
}
every_correction = pytest.mark.parametrize("correction", CORRECTIONS.values(), ids=CORRECTIONS)


def coefficients(correction: Transform, batch: Batch) -> Tensor:
    found = correction(batch).coefficients
    assert found is not None
    return found


def ratios(values: Sequence[float], **fields: Any) -> Batch:
    """One row whose proximal policy is that many times the rollout policy."""
    return batch_of(
        [-3.0] * len(values),
        [1.0] * len(values),
        proximal_logprobs=matrix(values).log() - 3.0,
        **fields,
    )


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (TruncatedImportance(2.0), [0.3, 0.6, 1, 1.8, 2]),
        (MaskedImportance(2.0), [0.3, 0.6, 1, 1.8, 0]),
        (MaskedImportance(2.0, weigh=False), [1, 1, 1, 1, 0]),
        (IcePop(0.5, 5.0), [0, 0.6, 1, 1.8, 0]),
        (Decoupled(cap=5.0), [0.3, 0.6, 1, 1.8, 0]),
        (Decoupled(cap=5.0, over="clamp"), [0.3, 0.6, 1, 1.8, 5]),
        (Decoupled(cap=None), [0.3, 0.6, 1, 1.8, 6]),
    ],
)
def test_five_ratios(correction, expected):
    found = coefficients(correction, ratios([0.3, 0.6, 1, 1.8, 6]))
    torch.testing.assert_close(
        found.double(), matrix([float(value) for value in expected]), atol=1e-6, rtol=0
    )


def test_at_most_one_what_the_engine_made_too_likely_is_weighed_down_and_nothing_up():
    """DART's alignment (arXiv 2509.23866): log-ratios -.5, .2 and 0 at a cap of 1."""
    found = coefficients(
        TruncatedImportance(1.0), ratios([math.exp(value) for value in (-0.5, 0.2, 0.0)])
    )
    torch.testing.assert_close(found.double(), matrix([0.6065307, 1.0, 1.0]), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("level", "ratio"), [("sequence", 1.349859), ("geometric", 1.105171), ("max", 1.648721)]
)
def test_a_row_has_the_product_the_geometric_mean_or_the_largest_ratio(level, ratio):
    batch = ratios([math.exp(value) for value in (0.1, -0.3, 0.5)])
    for correction in (TruncatedImportance(9.0, level=level), MaskedImportance(9.0, level=level)):
        found = coefficients(correction, batch).double()
        torch.testing.assert_close(found, torch.full_like(found, ratio), atol=1e-6, rtol=0)
    assert not coefficients(MaskedImportance(ratio - 1e-3, level=level), batch).any()


def test_the_ratio_of_a_row_stays_a_number():
    log_ratios, mask = torch.full((1, 9), -15.0), torch.arange(9)[None] < 8
    assert at_level(log_ratios * mask, mask, "sequence").tolist() == [[-20.0] * 8 + [0.0]]


def test_kpop_takes_the_kl_in_both_directions():
    batch = batch_of([math.log(0.9)], [1.0], proximal_logprobs=matrix([math.log(0.6)]))
    for threshold, expected in (
        (0.226290, 0),
        (0.311238, 0),
        (0.311240, 1),
    ):  # .226289 one way, .311239 the other
        assert float(coefficients(KPop(threshold), batch)) == expected
    back = batch_of([math.log(0.6)], [1.0], proximal_logprobs=matrix([math.log(0.9)]))
    assert (
        float(coefficients(KPop(0.311238), back)) == 0
        and float(coefficients(KPop(0.311240), back)) == 1
    )


def moved(old: float, new: float, advantage: float) -> Batch:
    return batch_of([math.log(old)], [advantage], current_logprobs=matrix([math.log(new)]))


def test_dppo_goes_by_the_distance_of_probabilities_not_by_their_ratio():
    assert float(coefficients(DPPO(), moved(0.5, 0.75, 1))) == 0  # 0.25 apart
    assert float(coefficients(DPPO(), moved(0.01, 0.05, 1))) == 1  # a ratio of 5, 0.04 apart
    assert float(coefficients(DPPO(), moved(0.5, 0.75, -1))) == 1  # the advantage asks to go back
    assert float(coefficients(DPPO(), moved(0.75, 0.5, -1))) == 0
    assert float(coefficients(DPPO(low=0.3, high=0.1), moved(0.75, 0.5, -1))) == 1
    for batch, kl in ((moved(0.5, 0.75, 1), 0.143841), (moved(0.01, 0.05, 1), 0.024736)):
        for threshold, expected in ((kl - 1e-6, 0), (kl + 1e-6, 1)):
            assert float(coefficients(DPPO("kl", threshold, threshold), batch)) == expected


@pytest.mark.parametrize(
    ("advantage", "threshold", "keep"),
    [(-1, 0.4, 0), (1, 0.4, 1), (-1, 0.4621, 1), (-1, 0.46209, 0)],
)
def test_the_sequence_mask_drops_rows_with_a_negative_advantage_that_became_unlikely(
    advantage, threshold, keep
):
    """The mean of log(old / new) is 0.462098."""
    old, new = (matrix(values).log() for values in ([0.5, 0.4, 0.3], [0.25, 0.3, 0.2]))
    batch = batch_of(old, [float(advantage)] * 3, current_logprobs=new)
    assert coefficients(SequenceMask(threshold), batch).tolist() == [[keep] * 3]


def on_rollout(log_ratios: Sequence[float], advantages: Sequence[float]) -> Batch:
    """One row at these log-ratios of the policy, before this update and before the step, to the rollout policy."""
    fields = {name: matrix(log_ratios) for name in ("current_logprobs", "proximal_logprobs")}
    return batch_of([0.0] * len(log_ratios), advantages, **fields)


SIX = on_rollout([0.1, 0.2, 0.3, 0.6, -0.5, 0.05], [1.0, 1, 1, 1, 1, -1])


def test_m2po_masks_the_largest_of_the_tokens_that_move_further_away():
    assert coefficients(M2PO(), SIX).tolist() == [
        [1, 1, 0, 0, 1, 1]
    ]  # -0.5 is a step back: it stays
    four = on_rollout([0.1, -0.2, 0.3, -0.6], [1.0, -1, 1, -1])
    assert coefficients(M2PO(), four).tolist() == [[1, 1, 0, 0]]
    assert float(M2PO()(SIX).metrics["second_moment"][0, 0]) == pytest.approx(0.125)


def test_m2po_over_all_tokens_keeps_one_at_least():
    assert coefficients(M2PO("mask_all"), SIX).tolist() == [[1, 1, 1, 0, 0, 1]]
    far = on_rollout([2.0, 3.0, -2.5], [1.0] * 3)
    assert coefficients(M2PO("mask_all"), far).tolist() == [[1, 0, 0]]
    assert coefficients(M2PO(), far).tolist() == [
        [0, 0, 1]
    ]  # the paper's rule lets the last one go too; -2.5 is a step back


@pytest.mark.parametrize(
    ("variant", "low", "high"), [("range", 1 - 0.1812692, 1 + 0.2214028), ("winsor", 0.7, 1.5)]
)
def test_m2po_sets_the_range_of_the_clip(variant, low, high):
    batch = on_rollout([0.1, 0.2, 0.3, 0.6], [1.0] * 4)
    made = M2PO(variant)(batch)
    assert made.coefficients is None
    assert made.ratio_low[0].tolist() == pytest.approx([low] * 4, abs=2e-6)
    assert made.ratio_high[0].tolist() == pytest.approx([high] * 4, abs=2e-6)
    found = PPOClipLoss()(PolicyOutput(matrix([0.1, 0.2, 0.3, 0.6])), made)[0]
    torch.testing.assert_close(
        -found, matrix([0.1, 0.2, 0.3, 0.6]).exp().clamp(max=high), atol=2e-6, rtol=0
    )


def test_no_token_gains_or_loses_its_gradient_by_the_rounding_of_the_next_pass():
    """The range is set from one forward pass, the loss is of the next one: here 1e-7 nats away. x is a token's own ratio."""
    draw = torch.Generator().manual_seed(0)
    for seed in range(100):
        batch = random_batch(seed, rows=8, width=16, spread=0.1)
        made = M2PO("range", 0.004)(batch)
        assert float(made.ratio_high[0, 0]) < 2  # the threshold binds
        signs = torch.randint(0, 2, batch.tokens.shape, generator=draw) * 2 - 1
        flowing = []
        for change in (torch.zeros(batch.tokens.shape), 1e-7 * signs):
            logprobs = (batch.current_logprobs + change).requires_grad_()
            PPOClipLoss()(PolicyOutput(logprobs), made)[0].sum().backward()
            flowing.append(logprobs.grad != 0)
        assert torch.equal(*flowing)


def test_m2po_ranges_are_wide_where_nothing_exceeds_the_threshold():
    for values in ([], [0.001, 0.002]):
        assert suffix_range(torch.tensor(values).double(), 0.04) == (0.05, 21.0)
        low, high = winsor_range(torch.tensor(values).double(), 0.04)
        assert low < 1e-8 and high > 1e8


def test_m2po_winsorized_moments_have_the_threshold_as_their_mean():
    """x^2 = 0.055 for the four of the range: e^-x and e^x are 0.7909498 and 1.2643028, inside of what is widest at least."""
    moments = torch.tensor([0.01, 0.04, 0.09, 0.36]).double()
    assert float(moments.clamp(max=0.055).mean()) == pytest.approx(0.04)
    assert (math.exp(-math.sqrt(0.055)), math.exp(math.sqrt(0.055))) == pytest.approx(
        (0.7909498, 1.2643028), abs=1e-6
    )
    assert winsor_range(moments, 0.04) == (0.7, 1.5)
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        moments = 4 * torch.rand(
            9, generator=draw, dtype=torch.float64
        )  # x above log 1.5 for the range to tell it
        threshold = 0.3 + 0.6 * float(torch.rand(1, generator=draw))
        low, high = winsor_range(moments, threshold)
        assert low == pytest.approx(1 / high)
        assert float(moments.clamp(max=math.log(high) ** 2).mean()) == pytest.approx(threshold)


@pytest.mark.parametrize("strict", [False, True])
def test_the_cutoff_keeps_what_leaving_out_one_after_another_keeps(strict):
    """The loops as they are published: the largest goes until the mean is small enough."""
    draw = torch.Generator().manual_seed(int(strict))
    for _ in range(50):
        moments = torch.rand(8, generator=draw, dtype=torch.float64).square() * 0.3
        left = list(range(8))
        while left:
            mean = sum(float(moments[place]) for place in left) / len(left)
            if (mean < 0.04 if strict else mean <= 0.04) or (strict and len(left) == 1):
                break
            left.remove(max(left, key=lambda place: float(moments[place])))
        assert kept(moments, 0.04, strict).nonzero().flatten().tolist() == left


def test_equal_moments_are_kept_or_left_out_together():
    moments = torch.tensor([0.09, 0.01, 0.09, 0.01]).double()
    assert kept(moments, 0.04, strict=False).tolist() == [
        False,
        True,
        False,
        True,
    ]  # one 0.09 alone would pass
    assert kept(moments, 0.0501, strict=False).tolist() == [True] * 4


def test_a_larger_threshold_keeps_more_and_the_kept_mean_is_below_it():
    batch = random_batch(seed=5)
    log_of_ratio = (batch.current_logprobs - batch.logprobs) * batch.loss_mask
    considered = batch.loss_mask & (log_of_ratio * batch.advantages > 0)
    before = torch.zeros(batch.tokens.shape, dtype=torch.bool)
    for threshold in (0.001, 0.01, 0.04, 0.2, 1.0, 100.0):
        keep = coefficients(M2PO(threshold=threshold), batch) != 0
        assert bool((before <= keep).all()) and bool(keep[~considered].all())
        moments = log_of_ratio.square()[considered & keep]
        assert not len(moments) or float(moments.mean()) <= threshold
        before = keep
    assert bool(before.all())


def one_token(advantage: float, proximal: float = 0.4) -> Batch:
    return batch_of([math.log(0.5)], [advantage], proximal_logprobs=matrix([math.log(proximal)]))


@pytest.mark.parametrize(("advantage", "value"), [(1.0, 0.96), (-1.0, -1.2)])
def test_decoupled_ppo_clips_around_the_proximal_policy(advantage, value):
    """Policy .6, proximal .4, rollout .5: w = .8, r = 1.5. Clipped around the rollout policy it would be 1.2 for either."""
    output, kernel = PolicyOutput(matrix([math.log(0.6)])), PPOClipLoss(anchor="proximal")
    assert -float(kernel(output, Decoupled()(one_token(advantage)))[0]) == pytest.approx(
        value, abs=1e-6
    )
    assert -float(PPOClipLoss()(output, one_token(advantage))[0]) == pytest.approx(
        1.2 * advantage, abs=1e-6
    )
    for proximal in (
        0.55,
        0.6,
        0.65,
    ):  # not clipped: the ratio to the rollout policy, whatever lies between
        unclipped = kernel(output, Decoupled()(one_token(advantage, proximal)))[0]
        assert -float(unclipped) == pytest.approx(1.2 * advantage, abs=1e-6)
    assert -float(kernel(output, Decoupled()(one_token(advantage, 0.5)))[0]) == pytest.approx(
        1.2 * advantage, abs=1e-6
    )


@pytest.mark.parametrize(("lag", "alpha"), [(0, 0), (1, 0), (2, 0.5), (3, 2 / 3), (5, 0.8)])
def test_the_proximal_policy_is_interpolated_by_version(lag, alpha):
    old, new = 0.5, 0.2
    fields = {"versions": torch.tensor([[7 - lag, -1]]), "trainer_version": torch.tensor([7])}
    batch = batch_of(
        [math.log(old), 0],
        [1.0, 0],
        torch.tensor([[True, False]]),
        current_logprobs=matrix([math.log(new), -3.0]),
        **fields,
    )
    for how, expected in (
        ("loglinear", (1 - alpha) * math.log(old) + alpha * math.log(new)),
        ("linear", math.log((1 - alpha) * old + alpha * new)),
    ):
        made = Decoupled(proximal=how)(batch)
        assert made.proximal_logprobs[0].tolist() == pytest.approx([expected, 0.0], abs=1e-6)
        assert float(made.coefficients[0, 0]) == pytest.approx(math.exp(expected) / old, abs=1e-6)
    assert Decoupled(proximal="linear").needs == {"current", "rollout"} and Decoupled(
        proximal="linear"
    ).fills == {"proximal"}


@every_correction
def test_where_all_policies_agree_nothing_is_corrected(correction):
    batch = random_batch()
    same = batch.replace(proximal_logprobs=batch.logprobs, current_logprobs=batch.logprobs)
    assert torch.equal(coefficients(correction, same), torch.ones(batch.tokens.shape))
    for variant in ("range", "winsor"):
        made = M2PO(variant)(same)
        assert bool((made.ratio_low <= 0.7).all()) and bool((made.ratio_high >= 1.5).all())


@every_correction
def test_corrections_change_something_and_go_with_their_rows(correction):
    batch = random_batch()
    found = coefficients(correction, batch)
    assert bool((found != 1)[batch.loss_mask].any()) and bool((found == 1)[~batch.loss_mask].all())
    order = [3, 5, 0, 2, 4, 1]
    assert torch.equal(coefficients(correction, batch.select(order)), found[order])
    before = torch.full(found.shape, 3.0)
    torch.testing.assert_close(
        coefficients(correction, batch.replace(coefficients=before)), 3 * found
    )


@every_correction
@pytest.mark.parametrize("poison", [50.0, -math.inf, math.nan])
def test_what_is_not_trained_decides_nothing(correction, poison):
    batch, names = (
        random_batch(),
        ("logprobs", "proximal_logprobs", "current_logprobs", "advantages"),
    )
    dirty = batch.replace(
        **{name: getattr(batch, name).masked_fill(~batch.loss_mask, poison) for name in names}
    )
    assert torch.equal(coefficients(correction, dirty), coefficients(correction, batch))


@every_correction
@pytest.mark.parametrize("distance", [1e4, -1e4])
def test_ratios_beyond_all_numbers_stay_finite(correction, distance):
    batch = random_batch()
    for rollout in (
        batch.logprobs + distance,
        torch.where(torch.arange(7) < 3, batch.logprobs + distance, batch.logprobs),
    ):
        made = correction(batch.replace(logprobs=rollout))
        assert made.coefficients.isfinite().all() and all(
            value.isfinite().all() for value in made.metrics.values()
        )


@every_correction
def test_batches_without_trained_tokens_and_single_tokens_are_corrected(correction):
    batch = random_batch()
    empty = batch.replace(loss_mask=torch.zeros_like(batch.loss_mask))
    assert torch.equal(coefficients(correction, empty), torch.ones(batch.tokens.shape))
    single = batch.replace(loss_mask=batch.loss_mask & (batch.loss_mask.cumsum(1) == 1)).select([0])
    assert coefficients(correction, single).isfinite().all()
    for variant in ("range", "winsor"):
        assert M2PO(variant)(empty).ratio_low.isfinite().all()


@every_correction
def test_a_correction_says_what_is_missing(correction):
    batch = random_batch().replace(proximal_logprobs=None, current_logprobs=None)
    with pytest.raises(
        RLFlowError, match=r"transform \w+: the batch has no (proximal|current)_logprobs"
    ):
        correction(batch)
    unknown = random_batch().replace(logprobs_known=torch.zeros(6, dtype=torch.bool))
    if correction != CORRECTIONS["dppo on proximal"]:
        with pytest.raises(
            RLFlowError, match="without the log-probs of the policy that sampled them"
        ):
            correction(unknown)


@pytest.mark.parametrize("name", ["tis", "mis", "icepop", "decoupled"])
def test_a_row_from_elsewhere_without_log_probs_is_not_corrected(name: str) -> None:
    """The proximal policy's stand in, so that its ratio is 1 (DART's injected successes); the other rows are as without it."""
    correction = TRANSFORM.build({"name": name}, "transform")
    batch = random_batch(spread=0.1)
    known = torch.tensor([True, True, False, True, True, True])
    source = torch.where(known, SOURCES.index("local"), SOURCES.index("replay"))
    mixed = batch.replace(
        logprobs=batch.logprobs * known[:, None], logprobs_known=known, source=source
    )
    found, alone = coefficients(correction, mixed), coefficients(correction, batch)
    assert bool(batch.loss_mask[2].any()) and torch.equal(found[2], torch.ones_like(found[2]))
    assert torch.equal(found[known], alone[known])


def test_kept_tokens_can_share_the_weight_of_all():
    batch = batch_of([[0.0] * 4], [[1.0] * 4], coefficients=matrix([2.0, 0.0, 0.0, 1.0]))
    assert KeptMean()(batch).coefficients.tolist() == [[4.0, 0.0, 0.0, 2.0]]
    nothing = batch.replace(coefficients=torch.zeros(1, 4))
    assert KeptMean()(nothing).coefficients.tolist() == [[0.0] * 4]
    assert KeptMean()(batch_of([0.0], [1.0])).coefficients is None


def test_what_was_capped_is_reported():
    metrics = TruncatedImportance(2.0)(ratios([0.3, 6, 1, 1.8, 6])).metrics
    assert metrics["capped"].tolist() == [[0, 1, 0, 0, 1]]
    assert Decoupled()(ratios([0.3, 6])).metrics["capped"].tolist() == [[0, 1]]
    assert not Decoupled(cap=None)(ratios([6.0])).metrics


@pytest.mark.parametrize(
    ("component", "message"),
    [
        ({"name": "mis", "low": 3}, "expected low below high, found 3.0 and 2.0"),
        ({"name": "icepop", "low": 6}, "expected low below high"),
        (
            {"name": "tis", "level": "row"},
            "level: expected one of token, sequence, geometric, max, found 'row'",
        ),
        (
            {"name": "m2po", "variant": "masks"},
            "variant: expected one of mask, winsor, range, mask_all.*Did you mean 'mask'",
        ),
        ({"name": "dppo", "divergence": "js"}, "divergence: expected one of tv, kl"),
        (
            {"name": "decoupled", "proximal": "version"},
            "proximal: expected one of recompute, loglinear, linear",
        ),
        ("sequence_mask", "missing keyword threshold"),
    ],
)
def test_wrong_values_are_config_errors(component, message):
    with pytest.raises(ConfigError, match=message):
        TRANSFORM.build(component)
