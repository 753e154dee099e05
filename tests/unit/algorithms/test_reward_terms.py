"""Reward terms against hand arithmetic, and what adding them does to returns, tokens and group statistics."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rlflow.algorithms.algorithm import Algorithm, make_advantage, make_loss
from rlflow.algorithms.filters.overlong_filter import OverlongFilter
from rlflow.algorithms.rewards import add_reward_term, per_trajectory, token_rewards
from rlflow.algorithms.transforms.kl_reward import KLReward
from rlflow.algorithms.transforms.normalize import NormalizeAdvantages
from rlflow.algorithms.transforms.overlong import Overlong
from rlflow.algorithms.transforms.reward_scale import AffineReward
from rlflow.batching import make_batch
from rlflow.components import TRANSFORM
from rlflow.errors import ConfigError, RLFlowError
from rlflow.types import Batch, Group, StopReason, Task, stamp
from tests.unit.algorithms.batches import Said, Tried, batch_of, split, trajectory_of


def added(batch: Batch, term: Tensor) -> Batch:
    return add_reward_term(batch, term, "a test")


@pytest.mark.parametrize(
    ("length", "tokens", "buffer", "expected"),
    [(16384, 20480, 4096, 0), (18432, 20480, 4096, -0.5), (20480, 20480, 4096, -1), (20481, 20480, 4096, -1),
     (700, 1000, 200, 0), (900, 1000, 200, -0.5), (1000, 1000, 200, -1), (0, 1000, 200, 0)],
)  # fmt: skip
def test_the_soft_penalty_of_long_responses(length, tokens, buffer, expected):
    batch = batch_of([Tried([Said(length)])])
    assert Overlong(buffer, tokens).term(batch).tolist() == pytest.approx([expected], abs=1e-9)
    assert Overlong(buffer, tokens, 2.0).term(batch).tolist() == pytest.approx(
        [2 * expected], abs=1e-9
    )


def test_the_length_is_that_of_all_segments_and_the_budget_of_the_run_is_the_limit():
    batch = batch_of([Tried([Said(4), Said(4, new_segment=True)]), Tried([Said(4)])])
    term = TRANSFORM.build({"name": "overlong", "buffer": 4}, tokens=10)
    assert term.term(batch).tolist() == [-0.5, -0.5, 0]
    with pytest.raises(ConfigError, match="expected a buffer of at most the 3 tokens, found 4"):
        Overlong(buffer=4, tokens=3)


def test_rewards_on_another_scale():
    """10 * (score - .5), and the mean of the group taken away: no deviation hides the scale."""
    batch = batch_of([1.0, 0.0])
    scaled = AffineReward(scale=10.0, bias=-0.5)(batch)
    assert scaled.rewards.tolist() == [5.0, -5.0]
    assert make_advantage({"name": "grpo", "std": "none"})(scaled).tolist() == [5.0, -5.0]


def test_an_attempt_that_a_filter_took_out_of_the_baseline_stays_out_of_it():
    """Returns 1, 0 and two cut attempts of 0: the mean is .5 without them, .25 with them; a term of one more for all."""
    attempts = [
        Tried([Said(2, 1.0)]),
        Tried([Said(2)]),
        *[Tried([Said(2)], stop=StopReason.MAX_TOKENS)] * 2,
    ]
    group = Group(
        "g",
        Task("g", "?"),
        [trajectory_of(tried, "g", place) for place, tried in enumerate(attempts)],
    )
    stamp(group.trajectories)
    for baseline, mean in ((True, 0.25), (False, 0.5)):
        (kept,) = OverlongFilter(baseline=baseline)([group])
        batch = AffineReward(bias=1.0)(make_batch(kept.trajectories))
        assert make_advantage({"name": "grpo", "std": "none"})(batch)[:2].tolist() == [
            1 - mean,
            -mean,
        ]


def test_kl_of_each_token_is_taken_from_its_reward():
    """Behaviour log-probs are -1; the reference's -1.5 and -.5: k1 = .5 and -.5."""
    batch = batch_of([Tried([Said(2, 1.0)])])
    batch = batch.replace(reference_logprobs=torch.tensor([[9.0, -1.5, -0.5]]))
    assert KLReward(0.1).term(batch).tolist() == [pytest.approx([0, -0.05, 0.05])]
    k3 = [math.exp(-0.5) + 0.5 - 1, math.exp(0.5) - 0.5 - 1]
    assert KLReward(1.0, "k3").term(batch)[0, 1:].tolist() == pytest.approx(
        [-value for value in k3], abs=1e-6
    )
    proximal = batch.replace(proximal_logprobs=torch.full((1, 3), -1.5))
    assert KLReward(1.0, anchor="proximal").term(proximal)[0].tolist() == pytest.approx([0, 0, 1.0])
    assert KLReward(1.0, anchor="proximal").needs == {"reference", "proximal"} and KLReward(
        1.0
    ).needs == {"reference", "rollout"}


def test_kl_in_the_reward_stays_finite_at_extreme_log_probs():
    batch = batch_of([0.0, 1.0])
    for far in (1e4, -1e4):
        away = batch.replace(reference_logprobs=torch.full(batch.tokens.shape, far))
        for estimator in ("k1", "k2", "k3"):
            assert torch.isfinite(KLReward(0.1, estimator).term(away)).all()


def test_tokens_earn_the_return():
    """A turn's reward is on its last token; that of a turn without any is on the trajectory's last one."""
    turns = [Said(2, 0.5), Said(1, 0.25, new_segment=True), Said(0, 4.0)]
    batch = batch_of([Tried(turns), Tried([Said(0, 3.0)])])
    earned = token_rewards(batch, "a test")
    assert earned[batch.loss_mask].tolist() == [0, 0.5, 4.25]
    assert per_trajectory(batch, earned).tolist() == [
        4.75,
        0,
    ]  # of the other, no token could have earned it


def test_a_term_of_tokens_adds_up_to_returns_and_group_statistics():
    attempts = split([1.0, 0.0, 0.5])
    batch = batch_of(attempts, [2.0])
    term = -torch.rand(
        batch.tokens.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    changed = added(batch, term)
    sums = per_trajectory(batch, term)
    expected = torch.tensor([1.0, 0.0, 0.5, 2.0], dtype=torch.float64) + sums
    first = torch.tensor([0, 3, 4, 5])  # the first attempt has three rows
    torch.testing.assert_close(changed.rewards[first], expected)
    torch.testing.assert_close(per_trajectory(changed, changed.token_rewards), expected)
    torch.testing.assert_close(changed.group_mean[first[:3]], expected[:3].mean().expand(3))
    torch.testing.assert_close(changed.group_std[first[:3]], expected[:3].std().expand(3))
    assert changed.group_size.tolist() == [3, 3, 3, 3, 3, 1]


def test_terms_of_attempts_and_of_tokens_add_up_in_any_order():
    batch = batch_of(split([1.0, 0.0]))
    tokens, whole = (
        torch.full(batch.tokens.shape, 0.5).double(),
        torch.full((len(batch),), -0.25).double(),
    )
    one, other = added(added(batch, tokens), whole), added(added(batch, whole), tokens)
    for name in ("rewards", "token_rewards", "group_mean", "group_std"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name))
    assert one.token_rewards[batch.loss_mask].tolist() == [0.5, 0.5, 0.5, 0.5, 0.5, 1.25, 0.5, 0.25]


def test_a_group_that_was_never_stamped_stays_so():
    batch = batch_of([1.0, 0.0])
    batch.group_size = torch.zeros(2, dtype=torch.int64)
    changed = added(batch, torch.ones(2))
    with pytest.raises(RLFlowError, match=r"2 of 2 rows .* lack group statistics"):
        make_advantage("grpo")(changed)


def algorithm(advantage: str, *transforms) -> Algorithm:
    return Algorithm(
        make_advantage(advantage),
        make_loss(["ppo_clip"]),
        lambda batch: batch.weights,
        transforms=transforms,
    )


def test_kl_in_the_reward_with_returns_to_go():
    """REINFORCE++ by hand: three tokens, k1 of .2 each, coefficient .5, return 1 on the last: to go .7, .8, .9."""
    batch = batch_of([Tried([Said(1), Said(2, 1.0, new_segment=True)])])
    batch = batch.replace(reference_logprobs=torch.full(batch.tokens.shape, -1.2))
    made = algorithm("reinforce_pp", KLReward(0.5))
    assert made.needs >= {"reference"}
    found = made.credit(batch).advantages[batch.loss_mask]
    torch.testing.assert_close(found, torch.tensor([-(1.5**0.5), 0.0, 1.5**0.5]), atol=1e-5, rtol=0)


def test_without_terms_the_rewards_are_the_environments_and_nothing_else_is_in_the_batch():
    batch = batch_of(split([1.0, 0.0]))
    credited = algorithm("grpo").credit(batch)
    assert credited.token_rewards is None and torch.equal(credited.rewards, batch.rewards)
    assert (
        credited.advantages.dtype == torch.float32
        and not credited.advantages[~batch.loss_mask].any()
    )


@pytest.mark.parametrize(
    ("over", "mean", "std"), [("trajectories", 0.0, 0.5), ("tokens", -0.25, 0.1875**0.5)]
)
def test_any_advantage_can_be_normalised_over_the_batch(over, mean, std):
    """Rewards 1 of 1 token and 0 of 3, minus their mean: .5 and -.5."""
    batch = batch_of([Tried([Said(1, 1.0)]), Tried([Said(3, 0.0)])])
    made = algorithm("reinforce", NormalizeAdvantages(over))
    found = made.credit(batch).advantages[batch.loss_mask]
    expected = [(0.5 - mean) / std] + [(-0.5 - mean) / std] * 3
    assert found.tolist() == pytest.approx(expected, abs=1e-6)
