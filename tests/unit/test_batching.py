"""Segments become padded rows; plans keep every row once, within the token limit, and balanced."""

from __future__ import annotations

import pytest
import torch

from rlflow.batching import make_batch, plan_microbatches, rows_with_advantage, split_minibatches
from rlflow.errors import ConfigError, DataError, RLFlowError
from rlflow.types import SOURCES, Group, Segment, StopReason, Task, Trajectory, Turn


def segment(length: int, first: int = 2, logprobs: bool = True) -> Segment:
    mask = torch.arange(length) >= first
    return Segment(
        tokens=torch.arange(length) + 10,
        loss_mask=mask,
        logprobs=-torch.arange(length).float() if logprobs else None,
        versions=torch.where(mask, 3, -1),
    )


def trajectory(
    *segments: Segment, reward: float = 1.0, stop: StopReason = StopReason.TERMINATED
) -> Trajectory:
    return Trajectory(
        "t", "g", list(segments), [], reward, stop, temperature=0.7, group_stats=(4, 0.25, 0.5)
    )


def test_rows_are_segments_and_describe_their_trajectory():
    batch = make_batch(
        [trajectory(segment(4), segment(6)), trajectory(segment(3, logprobs=False), reward=0.0)]
    )
    assert batch.tokens.tolist() == [
        [10, 11, 12, 13, 0, 0],
        [10, 11, 12, 13, 14, 15],
        [10, 11, 12, 0, 0, 0],
    ]
    assert batch.loss_mask.int().tolist() == [
        [0, 0, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 1],
        [0, 0, 1, 0, 0, 0],
    ]
    assert batch.logprobs.tolist() == [[0, 0, -2, -3, 0, 0], [0, 0, -2, -3, -4, -5], [0] * 6]
    assert batch.versions.tolist() == [
        [-1, -1, 3, 3, -1, -1],
        [-1, -1, 3, 3, 3, 3],
        [-1, -1, 3, -1, -1, -1],
    ]
    assert batch.lengths.tolist() == [4, 6, 3]
    assert batch.trajectory.tolist() == [0, 0, 1]
    assert batch.rewards.tolist() == [1.0, 1.0, 0.0]
    assert batch.group_size.tolist() == [4, 4, 4]
    assert batch.group_mean.tolist() == [0.25] * 3
    assert batch.group_std.tolist() == [0.5] * 3
    assert batch.logprobs_known.tolist() == [True, True, False]
    assert batch.temperatures.tolist() == pytest.approx([0.7] * 3)
    assert not batch.weights.any() and not batch.advantages.any()


def test_rewards_keep_the_precision_that_they_were_given():
    one = trajectory(segment(4), reward=1000.001)
    one.group_stats, one.turns = (2, 1000.0005, 0.0005 * 2**0.5), [Turn(0, 2, 4, 1000.001, 1.0)]
    batch = make_batch([one])
    assert (batch.rewards.item(), batch.group_mean.item(), batch.group_std.item()) == (
        1000.001,
        *one.group_stats[1:],
    )
    assert batch.turn_rewards[0, 2].item() == 1000.001


def test_named_rewards_and_their_statistics_travel_with_the_rows():
    first, second = trajectory(segment(4), segment(6)), trajectory(segment(3))
    first.rewards, first.rewards_stats = {"style": 0.5}, {"style": (0.25, 0.1), "speed": (1.0, 2.0)}
    batch = make_batch([first, second])
    assert {name: value.tolist() for name, value in batch.extras.items()} == {
        "reward/style": [0.5, 0.5, 0.0], "reward_mean/style": [0.25, 0.25, 0.0], "reward_std/style": [0.1, 0.1, 0.0],
        "reward/speed": [0.0] * 3, "reward_mean/speed": [1.0, 1.0, 0.0], "reward_std/speed": [2.0, 2.0, 0.0],
    }  # fmt: skip
    assert batch.select([2, 1]).extras["reward/style"].tolist() == [0.0, 0.5]


def test_groups_in_place_of_trajectories_are_refused():
    with pytest.raises(DataError, match="expected trajectories, found Group"):
        make_batch([Group("g", Task("t", "t"), [trajectory(segment(4))])])


def test_a_segment_without_tokens_is_refused_by_name():
    with pytest.raises(
        DataError, match="task 't', attempt 0: segment 1 has no tokens, expected one or more"
    ):
        make_batch([trajectory(segment(4), segment(0))])


def test_rows_know_their_group_attempt_segment_stop_and_source():
    first = trajectory(segment(4), segment(6))
    second = trajectory(segment(3), stop=StopReason.MAX_TURNS)
    other = trajectory(segment(3))
    second.attempt, other.group_id, other.source = 1, "h", "external"
    batch = make_batch([first, second, other])
    assert batch.group.tolist() == [0, 0, 0, 1]
    assert batch.attempt.tolist() == [0, 0, 1, 0]
    assert batch.segment.tolist() == [0, 1, 0, 0]
    assert [tuple(StopReason)[place].value for place in batch.stop] == ["terminated"] * 2 + [
        "max_turns",
        "terminated",
    ]
    assert [SOURCES[place] for place in batch.source] == ["local"] * 3 + ["external"]
    other.source = "elsewhere"
    with pytest.raises(
        DataError, match=r"expected a source out of local, external, .*, found 'elsewhere'"
    ):
        make_batch([other])


def test_tokens_know_the_turn_that_sampled_them():
    one = trajectory(segment(6), segment(4))
    one.turns = [Turn(0, 1, 3, 0.5, 2.0), Turn(0, 4, 6, -1.0, 1.0), Turn(1, 2, 4, 3.0, 0.25)]
    batch = make_batch([one])
    assert batch.turn.tolist() == [[-1, 0, 0, -1, 1, 1], [-1, -1, 2, 2, -1, -1]]
    assert batch.turn_rewards.tolist() == [[0, 0.5, 0.5, 0, -1, -1], [0, 0, 3, 3, 0, 0]]
    assert batch.turn_durations_s.tolist() == [[0, 2, 2, 0, 1, 1], [0, 0, 0.25, 0.25, 0, 0]]


def test_rows_are_selected_with_every_field_that_is_there():
    batch = make_batch(
        [trajectory(segment(4)), trajectory(segment(6)), trajectory(segment(3), reward=0.0)]
    )
    batch = batch.replace(reference_logprobs=torch.rand(3, 6), extras={"mine": torch.arange(3)})
    part = batch.select([2, 0])
    assert part.tokens.shape == part.turn.shape == part.reference_logprobs.shape == (2, 4)
    assert torch.equal(part.reference_logprobs, batch.reference_logprobs[[2, 0], :4])
    assert part.rewards.tolist() == [0.0, 1.0] and part.extras["mine"].tolist() == [2, 0]
    assert part.proximal_logprobs is None
    with pytest.raises(
        RLFlowError,
        match=r"loss mine: the batch has no proximal_logprobs, expected it from trainer\.score",
    ):
        part.require("proximal_logprobs", "loss mine")


def test_rows_with_advantage_keep_their_weights_and_order():
    batch = make_batch([trajectory(segment(length)) for length in (4, 6, 5)])
    advantages = torch.tensor([[0.0], [0.0], [-1.0]]) * batch.loss_mask
    advantages[0, 0] = 7.0  # off the mask: nothing is trained there
    advantages[1, 5] = 1e-9
    weights = torch.arange(18.0).view(3, 6)
    kept = rows_with_advantage(batch.replace(advantages=advantages, weights=weights))
    assert kept.lengths.tolist() == [6, 5]
    assert kept.weights.tolist() == weights[1:].tolist()
    everything = batch.replace(advantages=batch.loss_mask.float())
    assert rows_with_advantage(everything) is everything


def test_aborted_trajectories_get_no_row_and_keep_their_index():
    batch = make_batch([trajectory(segment(4), stop=StopReason.ABORTED), trajectory(segment(5))])
    assert batch.lengths.tolist() == [5]
    assert batch.trajectory.tolist() == [1]


def test_a_token_without_a_predecessor_is_never_trained():
    batch = make_batch([trajectory(segment(3, first=0))])
    assert batch.loss_mask.tolist() == [[False, True, True]]


def test_padding_widens_to_min_width_and_nothing_makes_an_empty_batch():
    assert make_batch([trajectory(segment(4))], min_width=9).tokens.shape == (1, 9)
    assert make_batch([trajectory(segment(4))], min_width=2).tokens.shape == (1, 4)
    assert len(make_batch([])) == 0


def check_plan(
    lengths: list[int], limit: int, shards: int, multiple: int = 1
) -> list[list[list[int]]]:
    plan = plan_microbatches(lengths, limit, shards, multiple=multiple)
    assert len(plan) == shards
    assert len(plan[0]) % multiple == 0
    assert len({len(shard) for shard in plan}) == 1
    microbatches = [rows for shard in plan for rows in shard]
    assert sorted(row for rows in microbatches for row in rows) == list(range(len(lengths)))
    for rows in microbatches:
        assert len(rows) <= 1 or len(rows) * max(lengths[row] for row in rows) <= limit
    return plan


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
@pytest.mark.parametrize("limit", [1, 60, 400, 5000])
@pytest.mark.parametrize("rows", [1, 2, 7, 40])
def test_every_row_is_planned_once_within_the_limit_on_equally_many_microbatches(
    rows, limit, shards
):
    generator = torch.Generator().manual_seed(rows * limit + shards)
    lengths = torch.randint(1, 120, (rows,), generator=generator).tolist()
    plan = check_plan(lengths, limit, shards)
    assert plan == plan_microbatches(torch.tensor(lengths), limit, shards)
    if rows >= shards and limit == 5000:  # room enough: no shard may idle
        assert all(rows for shard in plan for rows in shard)


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
@pytest.mark.parametrize("limit", [1, 60, 400, 5000])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 40])
def test_packed_rows_are_planned_once_with_the_limit_on_their_sum(rows, limit, shards):
    generator = torch.Generator().manual_seed(rows * limit + shards)
    lengths = torch.randint(0, 120, (rows,), generator=generator).tolist()
    plan = plan_microbatches(lengths, limit, shards, packed=True)
    assert plan == plan_microbatches(torch.tensor(lengths), limit, shards, packed=True)
    assert len(plan) == shards
    assert len({len(shard) for shard in plan}) == 1
    microbatches = [one for shard in plan for one in shard]
    assert sorted(row for one in microbatches for row in one) == list(range(rows))
    for one in microbatches:
        assert len(one) <= 1 or sum(lengths[row] for row in one) <= limit
    if rows >= shards and limit == 5000:
        assert all(one for shard in plan for one in shard)


def test_packed_microbatches_are_as_few_and_as_even_as_by_hand():
    assert plan_microbatches([6, 4, 5, 5], 10, packed=True) == [[[0, 1], [2, 3]]]
    assert plan_microbatches([30, 1, 1], 10, packed=True) == [[[0], [1, 2]]]
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 400, (256,), generator=generator).tolist()
    plan = plan_microbatches(lengths, 2048, 4, packed=True)
    loads = [sum(lengths[row] for row in rows) for shard in plan for rows in shard]
    assert max(loads) < 1.05 * min(loads)
    assert len(loads) <= 1.1 * sum(lengths) / 2048 + 4


def test_equal_rows_are_split_evenly_not_greedily():
    assert [len(rows) for shard in check_plan([5] * 17, 80, 2) for rows in shard] == [9, 8]
    assert [len(rows) for shard in check_plan([10] * 33, 160, 1) for rows in shard] == [11, 11, 11]


def test_shards_carry_about_the_same_number_of_tokens():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 400, (256,), generator=generator).tolist()
    plan = check_plan(lengths, 2048, 4)
    loads = [sum(lengths[row] for rows in shard for row in rows) for shard in plan]
    assert max(loads) < 1.05 * min(loads)
    padded = sum(len(rows) * max(lengths[row] for row in rows) for shard in plan for rows in shard)
    assert padded < 1.1 * sum(lengths)


@pytest.mark.parametrize("packed", [False, True])
def test_the_number_of_microbatches_is_a_multiple_and_rows_spread_over_them(packed):
    """Interleaved pipelines pass micro-batches on in groups."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 120, (19,), generator=generator).tolist()
    for shards in (1, 2):
        plan = plan_microbatches(lengths, 400, shards, packed, multiple=4)
        assert sorted(row for shard in plan for rows in shard for row in rows) == list(range(19))
        assert {len(shard) for shard in plan} <= {4, 8}
        assert all(rows for shard in plan for rows in shard)
    assert check_plan([5] * 3, 80, 1, multiple=2) == [[[0, 1], [2]]]
    assert check_plan([5], 80, 1, multiple=2) == [[[0], []]]


def test_a_row_over_the_limit_stands_alone_and_few_rows_leave_shards_idle():
    assert check_plan([3, 100, 3], 20, 1) == [[[1], [0, 2]]]
    assert check_plan([4], 20, 3) == [[[0]], [[]], [[]]]
    assert check_plan([], 20, 2) == [[[]], [[]]]


@pytest.mark.parametrize(("limit", "shards"), [(0, 1), (10, 0)])
def test_an_impossible_plan_is_a_config_error(limit, shards):
    with pytest.raises(ConfigError, match="at least 1"):
        plan_microbatches([1], limit, shards)


@pytest.mark.parametrize("seed", range(5))
def test_minibatches_keep_trajectories_whole_and_draw_every_row_once(seed):
    owners = [
        trajectory(*[segment(3 + index % 4) for _ in range(1 + index % 3)]) for index in range(10)
    ]
    batch = make_batch(owners)
    parts = split_minibatches(batch, 3, torch.Generator().manual_seed(seed))
    drawn = [set(part.trajectory.tolist()) for part in parts]
    assert sorted(len(names) for names in drawn) == [3, 3, 4]
    assert set.union(*drawn) == set(range(10)) and sum(map(len, drawn)) == 10
    assert sum(len(part) for part in parts) == len(batch)
    for part in parts:
        assert int(part.lengths.max()) == part.tokens.shape[1]


def test_minibatches_follow_the_generator():
    batch = make_batch([trajectory(segment(4)) for _ in range(12)])

    def draw(seed: int) -> list[list[int]]:
        parts = split_minibatches(batch, 2, torch.Generator().manual_seed(seed))
        return [part.trajectory.tolist() for part in parts]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_one_minibatch_is_the_batch_and_there_are_never_more_than_trajectories():
    batch = make_batch([trajectory(segment(4)), trajectory(segment(5))])
    assert split_minibatches(batch, 1, torch.Generator()) == [batch]
    assert [len(part) for part in split_minibatches(batch, 5, torch.Generator())] == [1, 1]
    with pytest.raises(ConfigError, match="minibatches_per_step"):
        split_minibatches(batch, 0, torch.Generator())


def test_what_is_large_has_a_repr_of_one_line():
    """A notebook's cell or an error shows sizes, not tensors."""
    rows = [trajectory(segment(400)), trajectory(segment(300), reward=0.5, stop=StopReason.ABORTED)]
    group = Group("g", Task("t" * 99, "prompt " * 500), rows)
    assert (
        repr(make_batch(rows)) == "Batch(1 rows of 400 tokens, 398 sampled, cpu)"
    )  # an aborted attempt has no row
    assert repr(group) == f"Group({'t' * 60!r}, 2 attempts, 1 usable)"
    assert repr(rows) == (
        "[Trajectory('t', 0 turns, 400 tokens, reward 1, terminated), "
        "Trajectory('t', 0 turns, 300 tokens, reward 0.5, aborted)]"
    )
    assert repr(rows[0].segments) == "[Segment(400 tokens, 398 sampled)]"
