"""Segments -> Batch, and the plans that cut a batch into mini-batches, shards and micro-batches.
Torch only."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlflow.errors import ConfigError, DataError
from rlflow.types import (
    NAMED_MEAN,
    NAMED_REWARD,
    NAMED_STD,
    SOURCES,
    Batch,
    Loss,
    Segment,
    StopReason,
    Trajectory,
)

ROUTES, ROUTED, ROUTES_VERSION = "routes", "routed", "routes_version"
"""Of `Batch.extras`: the experts of each token when it was sampled, of how many of a row's first
tokens they are known, and the oldest weights that any of them is of (-1: not known)."""


def make_batch(trajectories: Sequence[Trajectory], *, min_width: int = 0) -> Batch:
    """A row per segment, right-padded to the longest segment or `min_width`; advantages and weights
    0, to be filled.

    Every field of `Batch` that trajectories know is there. Aborted trajectories get no row.
    Position 0 is never trained: no token precedes it, so the policy has no probability for it.
    Rewards and their statistics are float64, for differences of large ones to survive. Raises
    DataError for a source that is not one of SOURCES, and for a segment without tokens."""
    for other in trajectories:
        if not isinstance(other, Trajectory):
            raise DataError(
                f"make_batch: expected trajectories, found {other!r:.80}; of groups give "
                "[one for group in groups for one in group.usable]."
            )
    rows = [
        (index, part, segment)
        for index, trajectory in enumerate(trajectories)
        if trajectory.usable
        for part, segment in enumerate(trajectory.segments)
    ]
    for index, part, segment in rows:
        if not len(segment):
            owner = trajectories[index]
            raise DataError(
                f"trajectory of task '{owner.task_id}', attempt {owner.attempt}: segment {part} "
                "has no tokens, expected one or more; leave it out."
            )
    width = max([min_width, *(len(segment) for _, _, segment in rows)])
    segments = [segment for _, _, segment in rows]
    owners = [trajectories[index] for index, _, _ in rows]
    loss_mask = _pad([segment.loss_mask for segment in segments], width, torch.bool, 0)
    loss_mask[:, :1] = False
    tokens = _pad([segment.tokens for segment in segments], width, torch.int64, 0)
    logprobs = [
        torch.zeros(len(segment)) if segment.logprobs is None else segment.logprobs
        for segment in segments
    ]
    return Batch(
        tokens=tokens,
        loss_mask=loss_mask,
        logprobs=_pad(logprobs, width, torch.float32, 0).masked_fill_(~loss_mask, 0.0),
        advantages=torch.zeros(tokens.shape),
        weights=torch.zeros(tokens.shape),
        lengths=_whole(len(segment) for segment in segments),
        temperatures=_real(owner.temperature for owner in owners).float(),
        logprobs_known=_whole(segment.logprobs is not None for segment in segments).bool(),
        versions=_pad([segment.versions for segment in segments], width, torch.int64, -1),
        trajectory=_whole(index for index, _, _ in rows),
        segment=_whole(part for _, part, _ in rows),
        **_facts(owners),
        **_turns(rows, trajectories, tokens.shape),
        extras={**_named_rewards(owners), **_routes(segments, tokens.shape)},
    )


def token_batch(rows: Sequence[Sequence[int]]) -> Batch:
    """Rows of token ids to be scored, at temperature 1; nothing of them is trained."""
    width = max(len(row) for row in rows)
    tokens = _pad([torch.tensor(row) for row in rows], width, torch.int64, 0)
    nothing = torch.zeros(tokens.shape)
    return Batch(
        tokens=tokens,
        loss_mask=torch.zeros(tokens.shape, dtype=torch.bool),
        logprobs=nothing,
        advantages=nothing,
        weights=nothing,
        lengths=torch.tensor([len(row) for row in rows]),
        temperatures=torch.ones(len(rows)),
    )


def _facts(owners: Sequence[Trajectory]) -> dict[str, Any]:
    """The (B,) fields of `Batch` that a row has from its trajectory and its group."""
    stats = [owner.group_stats or (0, 0.0, 0.0) for owner in owners]
    names = dict.fromkeys(owner.group_id for owner in owners)
    groups = {name: number for number, name in enumerate(names)}
    reasons = {reason: place for place, reason in enumerate(StopReason)}
    for owner in owners:
        if owner.source not in SOURCES:
            raise DataError(
                f"trajectory of task '{owner.task_id}': expected a source out of "
                f"{', '.join(SOURCES)}, found '{owner.source}'."
            )
    return {
        "rewards": _real(owner.reward for owner in owners),
        "group": _whole(groups[owner.group_id] for owner in owners),
        "group_size": _whole(size for size, _, _ in stats),
        "group_mean": _real(mean for _, mean, _ in stats),
        "group_std": _real(std for _, _, std in stats),
        "attempt": _whole(owner.attempt for owner in owners),
        "stop": _whole(reasons[owner.stop] for owner in owners),
        "source": _whole(SOURCES.index(owner.source) for owner in owners),
    }


def _whole(values: Iterable[int]) -> Tensor:
    return torch.tensor([*values], dtype=torch.int64)


def _real(values: Iterable[float]) -> Tensor:
    return torch.tensor([*values], dtype=torch.float64)


def _named_rewards(owners: Sequence[Trajectory]) -> dict[str, Tensor]:
    """(B,) float64 by NAMED_REWARD, NAMED_MEAN and NAMED_STD before each name; 0 where a trajectory
    or its group has none."""
    found: dict[str, Tensor] = {}
    for name in sorted({key for owner in owners for key in (*owner.rewards, *owner.rewards_stats)}):
        stats = [owner.rewards_stats.get(name, (0.0, 0.0)) for owner in owners]
        found[NAMED_REWARD + name] = _real(owner.rewards.get(name, 0.0) for owner in owners)
        found[NAMED_MEAN + name] = _real(mean for mean, _ in stats)
        found[NAMED_STD + name] = _real(std for _, std in stats)
    return found


def _turns(
    rows: Sequence[tuple[int, int, Segment]], trajectories: Sequence[Trajectory], shape: torch.Size
) -> dict[str, Any]:
    """The (B, T) fields of `Batch` that a token has from the turn that sampled it."""
    number, durations_s = torch.full(shape, -1), torch.zeros(shape)
    rewards = torch.zeros(shape, dtype=torch.float64)
    for row, (index, part, _) in enumerate(rows):
        for place, turn in enumerate(trajectories[index].turns):
            if turn.segment == part:
                number[row, turn.start : turn.stop] = place
                rewards[row, turn.start : turn.stop] = turn.reward
                durations_s[row, turn.start : turn.stop] = turn.duration_s
    return {"turn": number, "turn_rewards": rewards, "turn_durations_s": durations_s}


def _routes(segments: Sequence[Segment], shape: torch.Size) -> dict[str, Tensor]:
    """ROUTES (B, T, layers, k), ROUTED and ROUTES_VERSION (B,); nothing where no row has any.
    Raises DataError for segments whose routes are of different shapes, or no whole numbers."""
    known = [segment.routes for segment in segments if segment.routes is not None]
    if not known:
        return {}
    shapes = dict.fromkeys(tuple(routes.shape[1:]) for routes in known)
    kinds = dict.fromkeys(routes.dtype for routes in known)
    if len(shapes) > 1 or any(kind.is_floating_point for kind in kinds):
        raise DataError(
            "make_batch: expected whole numbers as routes, of the same layers and experts of a "
            f"token in every segment, found {', '.join(map(str, [*shapes, *kinds]))}; did two "
            "models sample?"
        )
    # The widest: 300 would be 44 in uint8
    kind = functools.reduce(torch.promote_types, kinds)
    routes = torch.zeros(*shape, *known[0].shape[1:], dtype=kind)
    counts = torch.zeros(len(segments), dtype=torch.int64)
    for row, segment in enumerate(segments):
        if segment.routes is not None:
            counts[row] = len(segment.routes)
            routes[row, : counts[row]] = segment.routes
    versions = _whole(segment.routes_version for segment in segments)
    return {ROUTES: routes, ROUTED: counts, ROUTES_VERSION: versions}


def lengthened(batch: Batch) -> Batch:
    """The batch with a token (id 0) behind every row, to be scored: what describes that token knows
    the whole row."""
    longer = batch.map(
        lambda value: torch.nn.functional.pad(value, (0, 1)) if value.dim() == 2 else value
    )
    return longer.replace(lengths=batch.lengths + 1)


def rows_with_advantage(batch: Batch) -> Batch:
    """The batch without the rows whose advantages are all 0; one row at least (the shortest), for
    an update to be made.

    For a loss that vanishes there, the gradient stays what it was: `weights` were made before, and
    no row's share depends on the others any more. Half of the rows of a step may be such: groups
    whose attempts all score the same."""
    rows = (batch.advantages * batch.loss_mask).ne(0).any(dim=1).nonzero().flatten()
    if len(rows) == len(batch):
        return batch
    return batch.select(rows if len(rows) else batch.lengths.argmin()[None])


def teaches(batch: Batch, loss: Loss) -> bool:
    """Whether the loss can have a gradient on the batch: one that vanishes at advantages of 0 has
    none where each token has no advantage, no weight, or a coefficient of 0."""
    if not loss.vanishes_at_zero_advantage:
        return True
    taught = batch.advantages * batch.weights
    if batch.coefficients is not None:
        taught = taught * batch.coefficients
    return bool(taught.any())


def _pad(rows: list[Tensor], width: int, dtype: torch.dtype, value: int) -> Tensor:
    padded = torch.full((len(rows), width), value, dtype=dtype)
    for row, values in zip(padded, rows, strict=True):
        row[: values.numel()] = values
    return padded


def split_minibatches(batch: Batch, n: int, generator: torch.Generator) -> list[Batch]:
    """`n` parts with equal numbers of trajectories (one more or less), drawn at random; the rows of
    a trajectory stay together and in order. Fewer parts where there are fewer trajectories; n = 1
    is the batch as it stands.

    Weights sum to 1 over one optimizer step: fill them for each part, after the split.
    """
    if n < 1:
        raise ConfigError(f"algorithm.minibatches_per_step: expected at least 1, found {n}")
    if n == 1:
        return [batch]
    owners = batch.require("trajectory", "split_minibatches")
    names = owners.unique()
    shuffled = names[torch.randperm(len(names), generator=generator)]
    parts = torch.tensor_split(shuffled, max(1, min(n, len(names))))
    return [batch.select(torch.isin(owners, part).nonzero().flatten()) for part in parts]


def plan_microbatches(
    lengths: Sequence[int] | Tensor,
    tokens_per_microbatch: int,
    shards: int = 1,
    packed: bool = False,
    multiple: int = 1,
) -> list[list[list[int]]]:
    """Row indices as [shard][micro-batch][row]; the same input always gives the same plan.

    A micro-batch takes rows x longest row <= tokens_per_microbatch tokens with padding; a single
    longer row stands alone. Every shard gets equally many micro-batches, the least multiple of
    `multiple` that suffices, of about equal size. An empty one stands only where there are too few
    rows to fill the last round. Rows of similar length meet, so that little is padded. With
    `packed`, rows lie end to end: the limit is on the sum of their lengths, and lengths mix."""
    if tokens_per_microbatch < 1 or shards < 1:
        raise ConfigError(
            f"micro-batch plan: tokens_per_microbatch {tokens_per_microbatch} and shards {shards} "
            "must be at least 1"
        )
    sizes = [int(length) for length in lengths]
    rows = sorted(range(len(sizes)), key=lambda row: (-sizes[row], row))
    if packed:
        bins = _bins(rows, sizes, tokens_per_microbatch, shards * multiple)
        return _deal(bins, shards, lambda chunk: _sum(chunk, sizes))
    count = max(1, len(_chunk(rows, sizes, tokens_per_microbatch)))
    count = -(-count // (shards * multiple)) * shards * multiple
    chunks = _even_chunks(rows, sizes, tokens_per_microbatch, count)
    return _deal(chunks, shards, lambda chunk: _cost(chunk, sizes))


def _chunk(rows: list[int], sizes: list[int], limit: int) -> list[list[int]]:
    """Runs of rows (longest first) of at most `limit` padded tokens each; greedy gives the fewest
    runs possible."""
    chunks: list[list[int]] = []
    for row in rows:
        if chunks and sizes[chunks[-1][0]] * (len(chunks[-1]) + 1) <= limit:
            chunks[-1].append(row)
        else:
            chunks.append([row])
    return chunks


def _even_chunks(rows: list[int], sizes: list[int], limit: int, count: int) -> list[list[int]]:
    """Exactly `count` runs, the largest as small as can be: bisects for the least limit that still
    needs no more."""
    low, high = 1, limit
    while low < high:
        middle = (low + high) // 2
        if len(_chunk(rows, sizes, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    chunks = _chunk(rows, sizes, high)
    while len(chunks) < count:
        splittable = [chunk for chunk in chunks if len(chunk) > 1]
        widest = max(splittable, key=lambda chunk: _cost(chunk, sizes), default=[])
        half = len(widest) // 2
        chunks.append(widest[half:])
        del widest[half:]
    return chunks


def _bins(rows: list[int], sizes: list[int], limit: int, multiple: int) -> list[list[int]]:
    """Bins of nearly equal sums, each of at most `limit` tokens or a single row; their number is a
    multiple of `multiple`.

    Longest first into the emptiest bin (LPT: Graham 1969); from the least number that could do, up
    to one that does."""
    least = -(-sum(min(sizes[row], limit) for row in rows) // limit)
    # No two rows of more than half share a bin
    count = max(1, least, sum(2 * sizes[row] > limit for row in rows))
    count = -(-count // multiple) * multiple
    while True:
        bins: list[list[int]] = [[] for _ in range(count)]
        loads = [(0, index) for index in range(count)]
        for row in rows:
            load, index = loads[0]
            bins[index].append(row)
            heapq.heapreplace(loads, (load + max(sizes[row], 1), index))
        if all(len(chunk) <= 1 or _sum(chunk, sizes) <= limit for chunk in bins):
            return bins
        count += multiple


def _deal(
    chunks: list[list[int]], shards: int, cost: Callable[[list[int]], int]
) -> list[list[list[int]]]:
    """Hands the micro-batches out in rounds, largest first, each round's largest to the shard with
    least so far."""
    chunks = sorted(chunks, key=lambda chunk: -cost(chunk))
    plan: list[list[list[int]]] = [[] for _ in range(shards)]
    loads = [0] * shards
    for start in range(0, len(chunks), shards):
        order = sorted(range(shards), key=lambda shard: loads[shard])
        for shard, chunk in zip(order, chunks[start : start + shards], strict=True):
            plan[shard].append(sorted(chunk))
            loads[shard] += cost(chunk)
    return plan


def _cost(chunk: list[int], sizes: list[int]) -> int:
    return max((sizes[row] for row in chunk), default=0) * len(chunk)


def _sum(chunk: list[int], sizes: list[int]) -> int:
    return sum(max(sizes[row], 1) for row in chunk)
