"""Loss terms against hand arithmetic and exact expectations; what stands off the mask never reaches loss or gradient."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle

import pytest
import torch
from torch import Tensor

from rlflow.algorithms import (
    EntropyLoss,
    KLLoss,
    PPOClipLoss,
    SFTLoss,
    SumLoss,
    token_weights,
)
from rlflow.algorithms.algorithm import make_loss
from rlflow.algorithms.losses.monitored import Monitored
from rlflow.errors import ConfigError, RLFlowError
from rlflow.types import Batch, PolicyOutput


def batch_of(
    old: Tensor, advantages: Tensor, mask: Tensor | None = None, **columns: Tensor
) -> Batch:
    rows, width = old.shape
    mask = torch.ones(rows, width, dtype=torch.bool) if mask is None else mask
    batch = Batch(
        tokens=torch.zeros(rows, width, dtype=torch.int64),
        loss_mask=mask,
        logprobs=old,
        advantages=advantages,
        weights=torch.zeros(rows, width),
        lengths=torch.full((rows,), width),
        temperatures=torch.ones(rows),
        **columns,
    )
    return batch.replace(weights=token_weights(batch))


def ppo_at(ratio: float, advantage: float, **options: float) -> tuple[float, float, float]:
    """(K, dK/dlog-prob, clip fraction) of one token."""
    logprobs = torch.tensor([[math.log(ratio)]], requires_grad=True)
    loss, metrics = PPOClipLoss(**options)(
        PolicyOutput(logprobs), batch_of(torch.zeros(1, 1), torch.tensor([[advantage]]))
    )
    loss.sum().backward()
    assert logprobs.grad is not None
    return -float(loss), -float(logprobs.grad), float(metrics["clip_fraction"])


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient"),
    [
        (0.5, 1, 0.5, 0.5),
        (0.5, -1, -0.8, 0),
        (1.0, 1, 1.0, 1.0),
        (1.0, -1, -1.0, -1.0),
        (1.5, 1, 1.28, 0),
        (1.5, -1, -1.5, -1.5),
        (3.0, 1, 1.28, 0),
        (3.0, -1, -3.0, -3.0),
    ],
)
def test_ppo_clip_value_and_gradient(ratio, advantage, value, gradient):
    got_value, got_gradient, clipped = ppo_at(ratio, advantage, clip_low=0.2, clip_high=0.28)
    assert got_value == pytest.approx(value, abs=1e-6)
    assert got_gradient == pytest.approx(gradient, abs=1e-6)
    assert clipped == (gradient == 0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [(1.5, 1, -1.28), (0.5, 1, -0.5), (1.5, -1, 1.5), (5, -1, 3), (0.5, -1, 0.8)],
)
def test_dual_clip_bounds_the_loss_of_negative_advantages(ratio, advantage, loss):
    value, gradient, _ = ppo_at(ratio, advantage, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    assert -value == pytest.approx(loss, abs=1e-6)
    assert (gradient == 0) == (loss in (-1.28, 3, 0.8))


@pytest.mark.parametrize(
    "loss", [PPOClipLoss(), PPOClipLoss(0.2, 0.28), PPOClipLoss(0.1, 0.1, dual_clip=3.0)]
)
def test_on_policy_the_gradient_is_the_advantage(loss):
    logprobs = -torch.rand(3, 5, generator=torch.Generator().manual_seed(0))
    advantages = torch.randn(3, 1, generator=torch.Generator().manual_seed(1)).expand(3, 5)
    policy = logprobs.clone().requires_grad_()
    loss(PolicyOutput(policy), batch_of(logprobs, advantages))[0].sum().backward()
    torch.testing.assert_close(policy.grad, -advantages)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda: PPOClipLoss(clip_low=-5.0),
            r"PPOClipLoss\.clip_low: expected a number from 0 to 1 or null, found -5\.0",
        ),
        (
            lambda: KLLoss(0.1, "k4"),
            r"KLLoss\.estimator: expected one of k1, k2, k3, wk1, wk3, found 'k4'",
        ),
        (
            lambda: SFTLoss(source="me"),
            r"SFTLoss\.source: expected one of local.* or null, found 'me'",
        ),
        (lambda: EntropyLoss("1"), r"EntropyLoss\.coefficient: expected a number, found '1'"),
    ],
)
def test_the_options_of_a_loss_that_a_script_makes_are_checked(make, told):
    with pytest.raises(ConfigError, match=told):
        make()


def test_recomputed_log_probs_replace_the_engines():
    batch = batch_of(
        torch.full((1, 2), -5.0), torch.ones(1, 2), proximal_logprobs=torch.full((1, 2), -1.0)
    )
    output = PolicyOutput(torch.full((1, 2), -1.0))
    assert PPOClipLoss(anchor="proximal")(output, batch)[1]["ratio"].tolist() == [[1.0, 1.0]]
    assert PPOClipLoss(anchor="proximal").needs == {"proximal"} and PPOClipLoss().needs == {
        "rollout"
    }
    ratio = PPOClipLoss()(output, batch)[1][
        "ratio"
    ]  # the anchor decides, not what happens to be in the batch
    torch.testing.assert_close(ratio, torch.full((1, 2), math.exp(4.0)))


def test_rows_without_behaviour_log_probs_are_refused_unless_recomputed():
    batch = batch_of(
        torch.zeros(2, 2), torch.ones(2, 2), logprobs_known=torch.tensor([True, False])
    )
    output = PolicyOutput(torch.zeros(2, 2))
    with pytest.raises(RLFlowError, match="anchor: proximal"):
        PPOClipLoss()(output, batch)
    with pytest.raises(RLFlowError, match="no proximal_logprobs"):
        PPOClipLoss(anchor="proximal")(output, batch)
    PPOClipLoss(anchor="proximal")(output, batch.replace(proximal_logprobs=torch.zeros(2, 2)))


def test_coefficients_multiply_kernels_and_no_other_term():
    """Importance corrections must not rescale KL or entropy."""
    batch = batch_of(
        torch.zeros(1, 3), torch.ones(1, 3), reference_logprobs=torch.full((1, 3), -0.5)
    )
    output = PolicyOutput(torch.full((1, 3), -0.1), torch.ones(1, 3))
    corrected = batch.replace(coefficients=torch.tensor([[2.0, 0.0, 1.0]]))
    for term in (KLLoss(0.1), EntropyLoss(0.1), SFTLoss()):
        torch.testing.assert_close(term(output, corrected)[0], term(output, batch)[0])
    kernel, plain = PPOClipLoss()(output, corrected)[0], PPOClipLoss()(output, batch)[0]
    torch.testing.assert_close(kernel, plain * torch.tensor([[2.0, 0.0, 1.0]]))
    whole = SumLoss((PPOClipLoss(), KLLoss(0.1)))
    torch.testing.assert_close(whole(output, corrected)[0], kernel + KLLoss(0.1)(output, batch)[0])


def test_old_kl_is_the_k3_estimate_against_the_old_policy():
    """x = log-prob - old log-prob = 0.5: e^x - 1 - x; off the mask it is 0."""
    batch = batch_of(torch.full((1, 2), -1.5), torch.ones(1, 2), torch.tensor([[True, False]]))
    old_kl = PPOClipLoss()(PolicyOutput(torch.full((1, 2), -1.0)), batch)[1]["old_kl"]
    torch.testing.assert_close(old_kl, torch.tensor([[math.exp(0.5) - 1.5, 0.0]]))


def test_the_log_prob_gap_leaves_out_rows_whose_log_probs_nobody_knows():
    batch = batch_of(
        torch.full((2, 1), -1.0), torch.ones(2, 1), logprobs_known=torch.tensor([True, False])
    )
    output = PolicyOutput(torch.full((2, 1), -1.25), torch.ones(2, 1))
    gap = Monitored(SFTLoss())(output, batch)[1]["logprob_gap"]
    assert gap.tolist() == [[0.25], [0.0]]


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (0.5, {"k1": -0.5, "k2": 0.125, "k3": 0.148721}),
        (-0.5, {"k1": 0.5, "k2": 0.125, "k3": 0.106531}),
    ],
)
def test_kl_estimators_of_one_token(x, expected):
    batch = batch_of(torch.zeros(1, 1), torch.zeros(1, 1), reference_logprobs=torch.tensor([[x]]))
    for estimator, value in expected.items():
        loss, metrics = KLLoss(0.5, estimator)(PolicyOutput(torch.zeros(1, 1)), batch)
        assert float(metrics["kl"]) == pytest.approx(value, abs=1e-6)
        assert float(loss) == pytest.approx(0.5 * value, abs=1e-6)


@pytest.mark.parametrize(
    ("estimator", "expectation", "gradient"),
    [
        ("k1", 0.0201355, 0.0),
        ("k2", 0.0199310, 0.0973116),
        ("k3", 0.0201355, 0.1),
        ("wk1", 0.0201355, 0.0973116),
        ("wk3", 0.0201355, 0.0973116),
    ],
)
def test_kl_estimators_in_expectation_over_two_actions(estimator, expectation, gradient):
    """Policy (.6, .4) by a logit, reference (.5, .5): the exact KL is .0201355 and its gradient .0973116. On-policy."""
    logit = torch.tensor(math.log(0.6 / 0.4), dtype=torch.float64, requires_grad=True)
    logprobs = torch.stack(
        [torch.nn.functional.logsigmoid(logit), torch.nn.functional.logsigmoid(-logit)]
    )
    reference = torch.full((1, 2), math.log(0.5), dtype=torch.float64)
    batch = batch_of(logprobs.detach()[None], torch.zeros(1, 2), reference_logprobs=reference)
    loss, _ = KLLoss(1.0, estimator)(PolicyOutput(logprobs[None]), batch)
    expected_loss = (logprobs.exp().detach() * loss[0]).sum()
    expected_loss.backward()
    assert float(expected_loss) == pytest.approx(expectation, abs=1e-6)
    assert float(logit.grad) == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize("estimator", ["wk1", "wk3"])
def test_the_weighted_estimators_are_unbiased_off_policy_too(estimator):
    """Tokens of an old policy (.2, .8), the same policy and reference: value and gradient of the exact KL, in float64."""
    logit = torch.tensor(math.log(0.6 / 0.4), dtype=torch.float64, requires_grad=True)
    logprobs = torch.stack(
        [torch.nn.functional.logsigmoid(logit), torch.nn.functional.logsigmoid(-logit)]
    )
    old = torch.tensor([0.2, 0.8], dtype=torch.float64)
    batch = batch_of(
        old.log()[None],
        torch.zeros(1, 2),
        reference_logprobs=torch.full((1, 2), math.log(0.5)).double(),
    )
    loss, metrics = KLLoss(1.0, estimator)(PolicyOutput(logprobs[None]), batch)
    expected = (old * loss[0]).sum()
    expected.backward()
    exact = 0.6 * math.log(1.2) + 0.4 * math.log(0.8)
    assert float(expected.detach()) == pytest.approx(exact, abs=1e-8)
    assert float(logit.grad) == pytest.approx(
        0.6 * 0.4 * math.log(1.5), abs=1e-8
    )  # d KL / d logit = p (1 - p) log(p / (1 - p))
    unweighted = KLLoss(1.0, estimator[1:])(PolicyOutput(logprobs[None].detach()), batch)[1]["kl"]
    assert torch.equal(metrics["kl"], unweighted)


@pytest.mark.parametrize(
    ("estimator", "old"), [("k1", None), ("k2", None), ("wk1", 0.4), ("wk3", None), ("wk3", 0.4)]
)
def test_the_gradient_is_that_of_the_exact_kl_however_far_the_reference_is(estimator, old):
    """Two actions by a logit, tokens of an old policy or the policy's own, against autograd of the exact KL in float64; of k1
    the expectation is 0. The value stays within its clamp of 10 nats, which most of these are beyond."""
    for p, ref in itertools.product([1e-6, 1e-3, 0.02, 0.3, 0.5, 0.98, 1 - 1e-3], repeat=2):
        logit = torch.tensor(math.log(p / (1 - p)), dtype=torch.float64, requires_grad=True)
        logprobs = torch.nn.functional.logsigmoid(torch.stack([logit, -logit]))
        reference = torch.tensor([ref, 1 - ref], dtype=torch.float64).log()
        (right,) = torch.autograd.grad(
            (logprobs.exp() * (logprobs - reference)).sum(), logit, retain_graph=True
        )
        drawn = (
            logprobs.detach()
            if old is None
            else torch.tensor([old, 1 - old], dtype=torch.float64).log()
        )
        batch = batch_of(drawn[None], torch.zeros(1, 2), reference_logprobs=reference[None])
        loss, metrics = KLLoss(1.0, estimator)(PolicyOutput(logprobs[None]), batch)
        (found,) = torch.autograd.grad((drawn.exp() * loss[0]).sum(), logit)
        expected = 0.0 if estimator == "k1" else float(right)
        assert float(found) == pytest.approx(expected, rel=1e-9, abs=1e-12), (p, ref)
        assert float(metrics["kl"].abs().max()) <= 10


@pytest.mark.parametrize("estimator", ["k2", "k3", "wk3"])
def test_no_token_is_pushed_away_from_the_reference(estimator):
    """In float32, to the end of what a log-ratio may be: the loss falls towards the reference. k3 is 0 beyond its clamp."""
    gaps = torch.linspace(-25, 25, 101)[None]
    logprobs = torch.zeros_like(gaps).requires_grad_()
    loss, _ = KLLoss(1.0, estimator)(
        PolicyOutput(logprobs), batch_of(gaps * 0, gaps * 0, reference_logprobs=gaps)
    )
    loss.sum().backward()
    towards = -logprobs.grad * gaps.sign()
    assert bool((towards >= 0).all())
    stopped = (gaps.double().exp() - gaps - 1 > 10) if estimator == "k3" else gaps == 0
    assert torch.equal(towards == 0, stopped | (gaps == 0))


@pytest.mark.parametrize("x", [0.0, 1e-6, -1e-6, 1e-5, -1e-4, 1e-3, -0.01])
def test_k3_of_float32_log_probs_is_right_to_the_last_digit(x):
    """Against x^2 / 2 + x^3 / 6 + x^4 / 24 in float64: e^x - x - 1 in float32 is 0, or negative, or twice too large."""
    gap = float(torch.tensor(x))
    exact = gap**2 / 2 + gap**3 / 6 + gap**4 / 24
    zero, gaps = torch.zeros(1, 1), torch.full((1, 1), x)
    found = KLLoss(1.0, "k3")(PolicyOutput(zero), batch_of(zero, zero, reference_logprobs=gaps))[1][
        "kl"
    ]
    assert float(found) == pytest.approx(exact, rel=1e-6, abs=0)
    old_kl = PPOClipLoss()(PolicyOutput(gaps), batch_of(zero, zero))[1]["old_kl"]
    assert float(old_kl) == pytest.approx(exact, rel=1e-6, abs=0)


def test_the_weighted_kl_takes_its_ratio_from_the_anchor_and_asks_for_no_more_than_that():
    reference, proximal = torch.full((1, 1), -0.5), torch.full((1, 1), -1.5)
    batch = batch_of(
        torch.full((1, 1), -1.0),
        torch.zeros(1, 1),
        reference_logprobs=reference,
        proximal_logprobs=proximal,
    )
    output, k1 = PolicyOutput(torch.full((1, 1), -1.0)), -0.5
    assert float(KLLoss(1.0, "wk1")(output, batch)[0]) == pytest.approx(k1)
    assert float(KLLoss(1.0, "wk1", anchor="proximal")(output, batch)[0]) == pytest.approx(
        math.exp(0.5) * k1
    )
    assert KLLoss(1.0, anchor="proximal").needs == {"reference", "proximal"}
    assert KLLoss(1.0).needs == {"reference", "rollout"} and KLLoss(
        1.0, "k3", anchor="proximal"
    ).needs == {"reference"}


@pytest.mark.parametrize("estimator", ["k3", "wk3"])
def test_kl_is_clamped_and_stays_finite(estimator):
    reference = torch.tensor([[80.0, -80.0]])
    batch = batch_of(torch.zeros(1, 2), torch.zeros(1, 2), reference_logprobs=reference)
    loss, _ = KLLoss(1.0, estimator, clamp=10.0)(PolicyOutput(torch.zeros(1, 2)), batch)
    assert loss.tolist() == [[10.0, 10.0]]
    far = torch.tensor([[1e4, -1e4]], requires_grad=True)
    loss, _ = KLLoss(1.0, estimator)(PolicyOutput(far), batch)
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(far.grad).all()


def test_kl_without_reference_scores_says_what_to_do():
    with pytest.raises(RLFlowError, match=r"trainer.snapshot\('reference'\)"):
        KLLoss(0.1)(PolicyOutput(torch.zeros(1, 1)), batch_of(torch.zeros(1, 1), torch.zeros(1, 1)))


def test_entropy_is_rewarded_and_must_be_given():
    batch = batch_of(torch.zeros(1, 2), torch.zeros(1, 2), torch.tensor([[False, True]]))
    loss, metrics = EntropyLoss(0.5)(
        PolicyOutput(torch.zeros(1, 2), torch.tensor([[9.0, 2.0]])), batch
    )
    assert loss.tolist() == [[0.0, -1.0]] and metrics["entropy"].tolist() == [[0.0, 2.0]]
    with pytest.raises(RLFlowError, match="needs"):
        EntropyLoss(0.5)(PolicyOutput(torch.zeros(1, 2)), batch)


def test_sft_is_the_negative_log_prob_of_trained_tokens():
    batch = batch_of(torch.zeros(1, 3), torch.zeros(1, 3), torch.tensor([[False, True, True]]))
    loss, metrics = SFTLoss()(PolicyOutput(torch.tensor([[-9.0, -1.0, -3.0]])), batch)
    assert loss.tolist() == [[0.0, 1.0, 3.0]]
    assert float((batch.weights * metrics["nll"]).sum()) == pytest.approx(2.0)


EVERY_TERM = SumLoss((PPOClipLoss(dual_clip=3.0), KLLoss(0.1), EntropyLoss(0.01), SFTLoss()))


@pytest.mark.parametrize(
    "loss", [*EVERY_TERM.losses, EVERY_TERM], ids=lambda loss: type(loss).__name__
)
@pytest.mark.parametrize("poison", [50.0, -math.inf, math.nan])
def test_masked_positions_reach_neither_loss_nor_gradient_nor_metrics(loss, poison):
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(4, 6, generator=generator) < 0.5
    clean = [-torch.rand(4, 6, generator=generator) for _ in range(4)]
    dirty = [torch.where(mask, value, poison) for value in clean]

    def run(
        old: Tensor, reference: Tensor, advantages: Tensor, policy: Tensor
    ) -> tuple[float, Tensor, dict[str, Tensor]]:
        logprobs = policy.clone().requires_grad_()
        output = PolicyOutput(
            logprobs, torch.where(mask, 1.0, poison) + 0 * torch.where(mask, logprobs, 0.0)
        )
        batch = batch_of(old, advantages, mask, reference_logprobs=reference)
        values, metrics = loss(output, batch)
        total = (batch.weights * values).sum()
        total.backward()
        assert logprobs.grad is not None
        return float(total), logprobs.grad, metrics

    total, gradient, metrics = run(*dirty)
    assert math.isfinite(total) and not gradient[~mask].any() and gradient.isfinite().all()
    assert all(value.isfinite().all() and not value.requires_grad for value in metrics.values())
    clean_total, clean_gradient, _ = run(*clean)
    assert total == pytest.approx(clean_total)
    torch.testing.assert_close(gradient, clean_gradient)


def test_huge_log_ratios_stay_finite():
    logprobs = torch.tensor([[300.0, -300.0]], requires_grad=True)
    loss, metrics = PPOClipLoss()(
        PolicyOutput(logprobs), batch_of(torch.zeros(1, 2), torch.tensor([[-1.0, 1.0]]))
    )
    loss.sum().backward()
    assert loss.isfinite().all() and metrics["old_kl"].isfinite().all()
    assert logprobs.grad is not None and logprobs.grad.isfinite().all()


def test_the_gradient_is_invariant_to_how_rows_are_split_into_micro_batches():
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(6, 5, generator=generator) < 0.7
    old, advantages, start = (torch.randn(6, 5, generator=generator) for _ in range(3))
    batch = batch_of(old, advantages, mask, reference_logprobs=old)

    def gradient(parts: list[list[int]]) -> Tensor:
        logprobs = start.clone().requires_grad_()
        for rows in parts:
            output = PolicyOutput(logprobs[rows], -logprobs[rows])
            part = batch.select(rows)
            (part.weights * EVERY_TERM(output, part)[0]).sum().backward()
        assert logprobs.grad is not None
        return logprobs.grad

    whole = gradient([list(range(6))])
    torch.testing.assert_close(gradient([[5, 0], [1, 2, 3], [4]]), whole)


def test_a_sum_adds_terms_and_asks_for_what_any_of_them_needs():
    batch = batch_of(torch.zeros(1, 1), torch.ones(1, 1), reference_logprobs=torch.zeros(1, 1))
    output = PolicyOutput(torch.full((1, 1), -0.1), torch.ones(1, 1))
    values, metrics = EVERY_TERM(output, batch)
    assert float(values) == pytest.approx(
        sum(float(term(output, batch)[0]) for term in EVERY_TERM.losses)
    )
    assert {"ratio", "clip_fraction", "kl", "entropy", "nll"} <= set(metrics)
    assert EVERY_TERM.needs == {"entropy", "reference", "rollout"}
    assert SumLoss((PPOClipLoss(), SFTLoss())).needs == {"rollout"}
    assert Monitored(SFTLoss()).needs == {"entropy"}


@pytest.mark.parametrize(
    "term", [PPOClipLoss(), PPOClipLoss(clip_low=0.1, clip_high=0.3, dual_clip=3.0)]
)
def test_a_term_that_says_that_it_vanishes_without_advantage_does(term: PPOClipLoss) -> None:
    logprobs = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss, _ = term(PolicyOutput(logprobs), batch_of(torch.zeros(4, 6), torch.zeros(4, 6)))
    loss.sum().backward()
    assert term.vanishes_at_zero_advantage
    assert not loss.any() and logprobs.grad is not None and not logprobs.grad.any()


def test_a_sum_vanishes_without_advantage_only_if_every_term_says_so() -> None:
    assert SumLoss((PPOClipLoss(), PPOClipLoss(dual_clip=3.0))).vanishes_at_zero_advantage
    for other in (
        KLLoss(0.01),
        EntropyLoss(0.01),
        SFTLoss(),
        lambda output, batch: (output.logprobs, {}),
    ):
        assert not SumLoss((PPOClipLoss(), other)).vanishes_at_zero_advantage
        assert not Monitored(other).vanishes_at_zero_advantage
    assert Monitored(PPOClipLoss()).vanishes_at_zero_advantage


def test_losses_survive_pickling_and_are_frozen():
    assert pickle.loads(pickle.dumps(EVERY_TERM)) == EVERY_TERM
    with pytest.raises(dataclasses.FrozenInstanceError):
        EVERY_TERM.losses = ()  # type: ignore[misc]


def test_losses_are_made_from_their_components():
    assert make_loss([{"name": "ppo_clip", "clip_high": 0.28}]) == PPOClipLoss(clip_high=0.28)
    assert make_loss([{"name": "sft"}, {"name": "kl", "coefficient": 1}]) == SumLoss(
        (SFTLoss(), KLLoss(1))
    )
    assert make_loss(["sft", {"name": "entropy", "coefficient": 0.1}]) == SumLoss(
        (SFTLoss(), EntropyLoss(0.1))
    )
    assert make_loss([{"name": "rlflow.algorithms.losses.sft:SFTLoss"}]) == SFTLoss()


@pytest.mark.parametrize(
    ("components", "message"),
    [
        ([], "at least one loss"),
        (["ppo_clp"], r"losses\[0\]: unknown name 'ppo_clp'. Did you mean 'ppo_clip'"),
        (["sft", "kl"], r"losses\[1\] 'kl': missing keyword coefficient"),
        ([{"name": "kl", "coeficient": 1}], "Did you mean 'coefficient'"),
        (
            [{"name": "kl", "coefficient": "much"}],
            r"losses\[0\].coefficient: expected a number from 0, found 'much'",
        ),
        (
            [{"name": "kl", "coefficient": -1}],
            r"losses\[0\].coefficient: expected a number from 0, found -1",
        ),
        (
            [{"name": "kl", "coefficient": float("nan")}],
            r"losses\[0\].coefficient: expected a number from 0, found nan",
        ),
        (
            [{"name": "ppo_clip", "clip_low": True}],
            "expected a number from 0 to 1 or null, found true",
        ),
        (
            [{"name": "kl", "coefficient": 1, "estimator": "k4"}],
            r"estimator: expected one of k1, k2, k3, wk1, wk3, found 'k4'",
        ),
        ([{"name": "ppo_clip", "clip_low": 1.5}], "clip_low"),
        ([{"name": "ppo_clip", "dual_clip": 0.5}], "dual_clip"),
        ([{"name": "rlflow.algorithms.losses.ppo_clip:Nothing"}], "ppo_clip has no 'Nothing'"),
    ],
)
def test_wrong_components_are_config_errors(components, message):
    with pytest.raises(ConfigError, match=message):
        make_loss(components)
