"""GRPO against hand arithmetic, and its invariances."""

from __future__ import annotations

import statistics

import pytest
import torch

from rlflow.algorithms import grpo
from rlflow.algorithms.algorithm import make_advantage
from rlflow.batching import make_batch
from rlflow.errors import ConfigError, RLFlowError
from rlflow.types import Batch, Segment, StopReason, Trajectory


def batch_of(*groups: list[float]) -> Batch:
    """One row per reward, with statistics as Rollout stamps them (float64, Bessel's correction)."""
    rewards, stats = [], []
    for group in groups:
        values = torch.tensor(group, dtype=torch.float64)
        std = float(values.std()) if len(group) > 1 else 0.0
        rewards += group
        stats += [(len(group), float(values.mean()), std)] * len(group)
    rows = len(rewards)
    zeros = torch.zeros(rows, 3)
    return Batch(
        tokens=zeros.long(),
        loss_mask=zeros.bool(),
        logprobs=zeros,
        advantages=zeros,
        weights=zeros,
        lengths=torch.full((rows,), 3),
        temperatures=torch.ones(rows),
        rewards=torch.tensor(rewards),
        group_size=torch.tensor([size for size, _, _ in stats]),
        group_mean=torch.tensor([mean for _, mean, _ in stats]),
        group_std=torch.tensor([std for _, _, std in stats]),
    )


def test_a_small_difference_of_large_rewards_counts_as_much_as_without_the_offset():
    def made(*rewards: float):
        stats = len(rewards), statistics.fmean(rewards), statistics.stdev(rewards)
        tokens = torch.arange(3)
        part = Segment(tokens, tokens > 0, torch.zeros(3), tokens)
        return make_batch(
            [
                Trajectory("t", "g", [part], [], r, StopReason.TERMINATED, group_stats=stats)
                for r in rewards
            ]
        )

    large, small = grpo(made(1000.001, 1000.0)), grpo(made(0.001, 0.0))
    assert large.dtype == torch.float32
    torch.testing.assert_close(large, small, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("std", "expected"),
    [
        ("population", [1.732047, -0.577349, -0.577349, -0.577349]),
        ("sample", [1.499997, -0.499999, -0.499999, -0.499999]),
        ("none", [0.75, -0.25, -0.25, -0.25]),
    ],
)
def test_one_success_in_four(std, expected):
    torch.testing.assert_close(
        grpo(batch_of([1.0, 0, 0, 0]), std=std), torch.tensor(expected), atol=1e-6, rtol=0
    )


def test_partial_credit_and_a_penalty():
    expected = torch.tensor([0.962249, 0.962249, -0.577349, -1.347149])
    torch.testing.assert_close(
        grpo(batch_of([1.0, 1, 0, -0.5]), std="population"), expected, atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("std", ["sample", "population", "none"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, -7.7])
def test_equal_rewards_and_groups_of_one_teach_exactly_nothing(reward, std):
    assert grpo(batch_of([reward] * 7, [reward]), std=std).tolist() == [0.0] * 8


def test_an_attempt_that_is_alone_may_keep_its_reward():
    batch = batch_of([1.0, 0.0], [0.5], [0.25] * 3)
    assert grpo(batch, single="raw")[2:].tolist() == [0.5, 0, 0, 0]
    assert torch.equal(grpo(batch, single="raw")[:2], grpo(batch)[:2])


@pytest.mark.parametrize("std", ["sample", "population", "none"])
def test_rounding_in_the_statistics_of_equal_rewards_is_not_magnified(std):
    batch = batch_of([0.1] * 7)
    batch.group_mean = torch.nextafter(batch.group_mean, torch.tensor(1.0))
    batch.group_std = torch.full((7,), 8e-9)
    assert grpo(batch, std=std).tolist() == [0.0] * 7


@pytest.mark.parametrize("std", ["sample", "population"])
def test_advantages_ignore_shift_and_scale_of_rewards(std):
    rewards = [0.3, 1.0, -0.5, 0.9]
    plain = grpo(batch_of(rewards), std=std)
    torch.testing.assert_close(
        grpo(batch_of([r + 10 for r in rewards]), std=std), plain, atol=1e-5, rtol=0
    )
    torch.testing.assert_close(
        grpo(batch_of([r * 50 for r in rewards]), std=std), plain, atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("std", ["sample", "population", "none"])
def test_a_group_sums_to_zero_and_permutes_with_its_rewards(std):
    rewards = [0.3, 1.0, -0.5, 0.9, 0.0]
    order = [3, 0, 4, 1, 2]
    plain = grpo(batch_of(rewards), std=std)
    assert float(plain.sum()) == pytest.approx(0.0, abs=1e-5)
    torch.testing.assert_close(
        grpo(batch_of([rewards[index] for index in order]), std=std), plain[order]
    )


def test_dropping_rows_leaves_the_advantage_of_the_others():
    batch = batch_of([1.0, 0, 0, 0], [1.0, 1, 0, 0])
    torch.testing.assert_close(grpo(batch.select([1, 4, 7])), grpo(batch)[[1, 4, 7]])


def test_missing_group_statistics_are_named():
    batch = batch_of([1.0, 0.0])
    batch.group_size = torch.tensor([2, 0])
    with pytest.raises(RLFlowError, match=r"1 of 2 rows \(first: row 1\) lack group statistics"):
        grpo(batch)


def test_an_advantage_is_made_from_its_component():
    batch = batch_of([1.0, 0, 0, 0])
    assert torch.equal(
        make_advantage({"name": "grpo", "std": "none"})(batch), grpo(batch, std="none")
    )


@pytest.mark.parametrize(
    ("component", "message"),
    [
        ({"name": "gpro"}, "Did you mean 'grpo'"),
        ({"name": "grpo", "stdd": "none"}, "Did you mean 'std'"),
        ({"name": "grpo", "eps": "tiny"}, "expected a number from 0, found 'tiny'"),
        (
            {"name": "grpo", "eps": -1},
            "algorithm.advantage.eps: expected a number from 0, found -1",
        ),
        ({"name": "grpo", "batch": 1}, "unknown keyword 'batch'. It takes: std, eps, single"),
        ({"name": "no.such:thing"}, "'no.such:thing': no module 'no'"),
    ],
)
def test_a_wrong_component_is_a_config_error(component, message):
    with pytest.raises(ConfigError, match=message):
        make_advantage(component)


def test_an_unknown_std_is_a_config_error():
    with pytest.raises(
        ConfigError, match="expected one of sample, population, none, found 'populaton'"
    ):
        grpo(batch_of([1.0, 0.0]), std="populaton")  # type: ignore[arg-type]
