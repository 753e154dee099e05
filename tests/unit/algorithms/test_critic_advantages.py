"""GAE and V-trace against arithmetic by hand and against their definitions as double sums in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from rlflow.algorithms import GAE, VTrace
from rlflow.algorithms.advantages.token_lines import TokenLines, whiten
from rlflow.algorithms.transforms.kl_reward import KLReward
from rlflow.batching import make_batch
from rlflow.components import ADVANTAGE
from rlflow.errors import ConfigError, RLFlowError
from rlflow.types import Batch, Segment, StopReason, Trajectory, Turn

REASONS = tuple(StopReason)


def segment(mask: str, draw: torch.Generator) -> Segment:
    """A token per character: `x` was sampled by the policy, `.` was not."""
    sampled = torch.tensor([character == "x" for character in mask])
    logprobs = torch.where(sampled, -torch.rand(len(mask), generator=draw), 0.0)
    return Segment(torch.arange(len(mask)), sampled, logprobs, torch.where(sampled, 0, -1))


def trajectory(
    number: int, masks: list[str], turns: list[tuple[int, int, int, float]], **facts: Any
) -> Trajectory:
    """masks: of its segments; turns: (segment, start, stop, reward)."""
    draw = torch.Generator().manual_seed(number)
    made = [Turn(*turn, duration_s=1.0) for turn in turns]
    total = facts.pop("reward", sum(turn.reward for turn in made))
    stop = facts.pop("stop", StopReason.TERMINATED)
    return Trajectory(
        f"t{number}", "g", [segment(mask, draw) for mask in masks], made, total, stop, **facts
    )


def scored(trajectories: list[Trajectory], seed: int = 0) -> Batch:
    """With random values and log-probs of the policy and of a reference, on trained tokens."""
    batch = make_batch(trajectories)
    draw = torch.Generator().manual_seed(seed)

    def column() -> Tensor:
        return torch.where(batch.loss_mask, torch.randn(batch.tokens.shape, generator=draw), 0.0)

    return batch.replace(
        values=column(),
        final_values=torch.randn(len(batch), generator=draw),
        proximal_logprobs=-column().abs(),
        reference_logprobs=-column().abs(),
    )


@pytest.fixture
def batch() -> Batch:
    """Two turns with an observation between them; two segments; a cut episode; a return beyond its turns; one token."""
    return scored(
        [
            trajectory(0, ["..xxx..xx"], [(0, 2, 5, 0.5), (0, 7, 9, 1.0)]),
            trajectory(1, ["..xx", "...xxx.x"], [(0, 2, 4, 0.25), (1, 3, 6, -1.0), (1, 7, 8, 2.0)]),
            trajectory(2, [".xxxx."], [(0, 1, 5, 0.75)], stop=StopReason.MAX_TURNS),
            trajectory(
                3,
                [".xx.x"],
                [(0, 1, 3, 0.5), (0, 4, 5, 0.5)],
                reward=0.25,
                stop=StopReason.MAX_TOKENS,
            ),
            trajectory(4, ["....x"], [(0, 4, 5, 1.0)]),
        ]
    )


@dataclasses.dataclass
class Sampled:
    """One trained token of a trajectory."""

    row: int
    column: int
    reward: float
    value: float
    ratio: float
    penalty: float


def lines_of(batch: Batch) -> list[tuple[list[Sampled], float]]:
    """Per trajectory its trained tokens, found by looping; and the value after the end where it was cut, else 0."""
    found = []
    for name in batch.trajectory.unique().tolist():
        rows = sorted(
            (batch.trajectory == name).nonzero().flatten().tolist(),
            key=lambda row: int(batch.segment[row]),
        )
        places = [
            (row, column)
            for row in rows
            for column in range(batch.tokens.shape[1])
            if batch.loss_mask[row, column]
        ]
        line = [
            Sampled(
                *place,
                reward=0.0,
                value=float(batch.values[place]),
                ratio=float(
                    (batch.proximal_logprobs.double() - batch.logprobs.double())[place].exp()
                ),
                penalty=float((batch.proximal_logprobs - batch.reference_logprobs)[place]),
            )
            for place in places
        ]
        for index, place in enumerate(places):
            turn = int(batch.turn[place])
            if turn >= 0 and all(int(batch.turn[other]) != turn for other in places[index + 1 :]):
                line[index].reward = float(batch.turn_rewards[place])
        line[-1].reward += float(batch.rewards[rows[0]]) - sum(token.reward for token in line)
        cut = REASONS[int(batch.stop[rows[0]])] in (StopReason.MAX_TURNS, StopReason.MAX_TOKENS)
        found.append((line, float(batch.final_values[rows[-1]]) if cut else 0.0))
    return found


def placed(batch: Batch, numbers: list[tuple[Sampled, float]]) -> Tensor:
    whole = torch.zeros(batch.tokens.shape, dtype=torch.float64)
    for token, number in numbers:
        whole[token.row, token.column] = number
    return whole


def gae_by_definition(
    batch: Batch, gamma: float, lam: float, kl: float, bootstrap: bool
) -> tuple[Tensor, Tensor]:
    """A_t = sum over l of (gamma lam)^l delta_(t+l), each written out."""
    advantages, returns = [], []
    for line, after in lines_of(batch):
        ahead = [token.value for token in line[1:]] + [after if bootstrap else 0.0]
        deltas = [
            token.reward - kl * token.penalty + gamma * following - token.value
            for token, following in zip(line, ahead)
        ]
        for t, token in enumerate(line):
            total = sum(
                (gamma * lam) ** (later - t) * deltas[later] for later in range(t, len(line))
            )
            advantages.append((token, total))
            returns.append((token, total + token.value))
    return placed(batch, advantages), placed(batch, returns)


def vtrace_by_definition(
    batch: Batch, gamma: float, lam: float, most_rho: float, most_c: float, bootstrap: bool
) -> tuple[Tensor, Tensor]:
    """v_s = V_s + sum over t >= s of gamma^(t-s) (prod of c_i, s <= i < t) delta_t: the sum of IMPALA, section 4.1."""
    advantages, returns = [], []
    for line, after in lines_of(batch):
        end = after if bootstrap else 0.0
        ahead = [token.value for token in line[1:]] + [end]
        rho = [min(most_rho, token.ratio) for token in line]
        c = [lam * min(most_c, token.ratio) for token in line]
        targets = []
        for s, token in enumerate(line):
            total = token.value
            for t in range(s, len(line)):
                trace = 1.0
                for i in range(s, t):
                    trace *= c[i]
                total += (
                    gamma ** (t - s)
                    * trace
                    * rho[t]
                    * (line[t].reward + gamma * ahead[t] - line[t].value)
                )
            targets.append(total)
        for s, token in enumerate(line):
            following = targets[s + 1] if s + 1 < len(line) else end
            advantages.append((token, rho[s] * (token.reward + gamma * following - token.value)))
            returns.append((token, targets[s]))
    return placed(batch, advantages), placed(batch, returns)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-6)


def test_gae_by_hand() -> None:
    """r = (0, 1), V = (0.5, 0.25), gamma 0.9, lam 0.8: delta = (0.9 * 0.25 - 0.5, 1 - 0.25) = (-0.275, 0.75), A_0 = -0.275 +
    0.72 * 0.75 = 0.265."""
    one = scored([trajectory(0, [".x..x"], [(0, 1, 5, 1.0)])])
    one = one.replace(values=torch.tensor([[0.0, 0.5, 0.0, 0.0, 0.25]]))
    advantages, returns = GAE(gamma=0.9, lam=0.8, whiten=False)(one)
    close(advantages, torch.tensor([[0.0, 0.265, 0.0, 0.0, 0.75]], dtype=torch.float64))
    close(returns, torch.tensor([[0.0, 0.765, 0.0, 0.0, 1.0]], dtype=torch.float64))


@pytest.mark.parametrize("bootstrap", [False, True])
@pytest.mark.parametrize(
    "gamma, lam, kl",
    [(1.0, 1.0, 0.0), (0.9, 0.8, 0.0), (1.0, 0.5, 0.3), (0.0, 1.0, 0.1), (0.9, 0.0, 0.0)],
)
def test_gae_is_its_double_sum(
    batch: Batch, gamma: float, lam: float, kl: float, bootstrap: bool
) -> None:
    rewarded = KLReward(kl, anchor="proximal")(batch)
    advantages, returns = GAE(gamma=gamma, lam=lam, bootstrap=bootstrap, whiten=False)(rewarded)
    expected = gae_by_definition(batch, gamma, lam, kl, bootstrap)
    close(advantages, expected[0])
    close(returns, expected[1])


@pytest.mark.parametrize("bootstrap", [False, True])
@pytest.mark.parametrize(
    "gamma, lam, rho, c", [(1.0, 1.0, 1.0, 1.0), (0.9, 0.8, 2.0, 1.0), (0.5, 1.0, 0.7, 0.3)]
)
def test_vtrace_is_its_double_sum(
    batch: Batch, gamma: float, lam: float, rho: float, c: float, bootstrap: bool
) -> None:
    advantages, returns = VTrace(gamma=gamma, lam=lam, rho=rho, c=c, bootstrap=bootstrap)(batch)
    expected = vtrace_by_definition(batch, gamma, lam, rho, c, bootstrap)
    close(advantages, expected[0])
    close(returns, expected[1])


def test_on_policy_vtrace_is_gae(batch: Batch) -> None:
    on_policy = batch.replace(proximal_logprobs=batch.logprobs)
    for found, expected in zip(
        VTrace(gamma=0.9)(on_policy), GAE(gamma=0.9, whiten=False)(batch), strict=True
    ):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_every_token_of_a_trajectory_gets_its_return_where_nothing_is_discounted_or_expected(
    batch: Batch,
) -> None:
    silent = batch.replace(values=torch.zeros_like(batch.values))
    advantages, returns = GAE(whiten=False)(silent)
    first = {name: (batch.trajectory == name).nonzero()[0] for name in range(5)}
    for name, total in enumerate(
        (1.5, 1.25, 0.75, 0.25, 1.0)
    ):  # the fourth is shaped: its turns say 1.0
        row = first[name]
        assert returns[row][batch.loss_mask[row]][0] == pytest.approx(total)
    assert torch.equal(advantages, returns)
    assert torch.equal(advantages[~batch.loss_mask], torch.zeros(int((~batch.loss_mask).sum())))


def test_rows_in_another_order_and_wider_padding_give_the_same(batch: Batch) -> None:
    order = torch.tensor([5, 2, 0, 4, 1, 3])  # a trajectory's second segment comes before its first
    wide = batch.map(
        lambda value: torch.nn.functional.pad(value, (0, 3)) if value.dim() == 2 else value
    )
    expected = GAE(gamma=0.9, lam=0.9)(batch)
    shuffled = wide.map(lambda value: value[order])
    for found, whole in zip(GAE(gamma=0.9, lam=0.9)(shuffled), expected, strict=True):
        torch.testing.assert_close(found[:, :-3], whole[order], atol=1e-6, rtol=1e-6)


def test_what_is_not_trained_reaches_nothing(batch: Batch) -> None:
    """Values and log-probs of observations and padding may be anything."""
    noise = torch.where(batch.loss_mask, 0.0, float("nan"))
    changes = {name: getattr(batch, name) + noise for name in ("values", "proximal_logprobs")}
    for method in (GAE(gamma=0.9), VTrace(gamma=0.9)):
        for found, expected in zip(method(batch.replace(**changes)), method(batch), strict=True):
            assert torch.equal(found, expected)


def test_whitened_advantages_have_mean_0_and_variance_1_and_the_returns_stay(batch: Batch) -> None:
    advantages, returns = GAE(gamma=0.9)(batch)
    plain, same = GAE(gamma=0.9, whiten=False)(batch)
    kept = advantages[batch.loss_mask].double()
    assert float(kept.mean()) == pytest.approx(0, abs=1e-6) and float(kept.var()) == pytest.approx(
        1, abs=1e-5
    )
    expected = (plain[batch.loss_mask] - plain[batch.loss_mask].mean()) / plain[
        batch.loss_mask
    ].std()
    torch.testing.assert_close(advantages[batch.loss_mask], expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(returns, same)


def test_one_token_and_equal_tokens_whiten_to_zero() -> None:
    real = torch.tensor([[True, True, False]])
    assert torch.equal(whiten(torch.tensor([[3.0, 3.0, 9.0]]), real), torch.zeros(1, 3))
    assert torch.equal(
        whiten(torch.tensor([[3.0, 5.0, 9.0]]), torch.tensor([[True, False, False]])),
        torch.zeros(1, 3),
    )


def test_a_trajectory_without_a_trained_token_harms_nobody(batch: Batch) -> None:
    empty = trajectory(5, ["...."], [], reward=1.0)
    more = scored([trajectory(0, ["..xxx..xx"], [(0, 2, 5, 0.5), (0, 7, 9, 1.0)]), empty])
    advantages, returns = GAE()(more)
    assert bool(advantages.isfinite().all()) and not bool(returns[1].any())
    nothing, _ = GAE()(scored([empty]))
    assert not bool(nothing.any())


def test_a_long_line_is_summed_in_double_precision() -> None:
    """5,000 tokens, gamma lam = 1: the first advantage is the sum of all rewards less the first value."""
    count = 5_000
    one = scored([trajectory(0, ["." + "x" * count], [(0, 1, count + 1, 1000.0)])])
    advantages, returns = GAE(whiten=False)(one)
    assert float(returns[0, 1]) == 1000.0
    assert float(advantages[0, 1]) == pytest.approx(1000.0 - float(one.values[0, 1]), rel=1e-7)


def test_ratios_beyond_all_bounds_stay_finite(batch: Batch) -> None:
    far = torch.where(
        batch.loss_mask, torch.tensor([1e4, -1e4]).repeat(20)[: batch.tokens.shape[1]], 0.0
    )
    for found in VTrace(gamma=0.9)(batch.replace(proximal_logprobs=far)):
        assert bool(found.isfinite().all())


def test_needs_and_refusals(batch: Batch) -> None:
    assert GAE().needs == {"values"} and VTrace().needs == {"values", "proximal", "rollout"}
    with pytest.raises(
        RLFlowError,
        match=r"advantage gae: the batch has no values, expected it from trainer\.score",
    ):
        GAE()(dataclasses.replace(batch, values=None))
    with pytest.raises(ConfigError, match=r"c: expected at most rho = 1 .*found 2"):
        VTrace(c=2.0)
    with pytest.raises(
        ConfigError, match=r"algorithm\.advantage\.lam: expected a number from 0 to 1, found 1\.5"
    ):
        ADVANTAGE.check({"name": "gae", "lam": 1.5}, where="algorithm.advantage")


def test_lines_follow_segments_and_skip_observations(batch: Batch) -> None:
    lines = TokenLines.of(batch, "test")
    assert lines.real.sum(dim=1).tolist() == [5, 6, 4, 3, 1]
    columns = [number % batch.tokens.shape[1] for number in lines.place[1, :6].tolist()]
    assert columns == [2, 3, 3, 4, 5, 7]
    assert torch.equal(lines.put(lines.take(batch.values)), batch.values)
