"""One pass over a batch: micro-batches of padded or packed rows through Megatron's pipeline
schedule, and what comes out on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import MegatronModule
from megatron.core.utils import unwrap_model
from torch import Tensor

from rlflow.batching import plan_microbatches
from rlflow.errors import RLFlowError
from rlflow.trainer.megatron.cpu import device, native
from rlflow.trainer.megatron.logprobs import OutputLayer, token_logprobs, top_tokens
from rlflow.trainer.megatron.model import ValueHead, token_values
from rlflow.trainer.megatron.packing import Feed, Share, pack, pad
from rlflow.trainer.megatron.router_replay import ExpertChoice, forget
from rlflow.trainer.megatron.world import World
from rlflow.trainer.reducing import reduce_tokens
from rlflow.trainer.scoring import empty_scores, teacher_top_ids
from rlflow.types import TEACHER_TOP_IDS, Batch, Loss, PolicyOutput, Reduction

Head = OutputLayer | ValueHead
"""What stands on the hidden states of the last stage."""


@dataclass
class Microbatch:
    """Rows for one forward pass. `rows`: their indices in the whole batch, empty for a dummy that
    only keeps ranks in step; `tokens`: of the rows.

    `feed`: what this rank's model sees of `batch`. The loss sees all of `batch`. `padding`: tokens
    of the feed that routers do not count; None where they count nothing."""

    rows: list[int]
    batch: Batch
    feed: Feed
    tokens: int
    padding: Tensor | None = None


@dataclass(frozen=True)
class MicrobatchLimits:
    """How rows become micro-batches: `tokens_per_microbatch` counts padding, unless the rows are
    `packed` without any. `granule`: what a rank's tokens are filled up to a multiple of."""

    tokens_per_microbatch: int
    packed: bool = False
    granule: int = 1


def plan(batch: Batch, limits: MicrobatchLimits, world: World) -> list[Microbatch]:
    """This data-parallel rank's micro-batches; every rank gets equally many.

    Where model chunks take turns, Megatron's schedule passes micro-batches on in groups of as many
    as there are pipeline ranks, and all of one shape (it can exchange shapes, but two ranks that do
    so in turns wait for each other forever): so their rows lie end to end, packed or not, and are
    filled up to the longest."""
    interleaved = world.layout.virtual_pipeline > 1
    groups = world.pipeline_parallel if interleaved else 1
    packed = limits.packed or interleaved
    shards = plan_microbatches(
        batch.lengths, limits.tokens_per_microbatch, world.data_parallel, packed, multiple=groups
    )
    mine, share = shards[world.data_rank], Share.of(world, limits.granule)
    taken = [_take(batch, rows) for rows in mine]
    feeds = [pack(part, share) if packed else pad(part, share) for part in taken]
    if interleaved:
        longest = max(feed.width for feed in feeds)
        feeds = [pack(part, share, longest) for part in taken]
    where = device()
    return [
        Microbatch(rows, part.to(where), feed.to(where), int(part.lengths.sum()) if rows else 0)
        for rows, part, feed in zip(mine, taken, feeds, strict=True)
    ]


def forward_backward(
    model: Sequence[DistributedDataParallel],
    world: World,
    microbatches: Sequence[Microbatch],
    loss: Loss,
    total_tokens: int,
    routing: ExpertChoice | None = None,
) -> dict[str, float]:
    """Accumulates the gradients of sum(weights * loss) over all ranks; returns it as `loss`, and
    the metrics as they stand before `finish_metrics`. routing: who chooses the experts of tokens;
    none: the routers, as always.

    The loss function gives Megatron N * sum(weights * loss), N = `total_tokens`, and its own
    tokens' number; Megatron divides the gradients by the all-reduced number, which is N
    (`calculate_per_token_loss`). Context-parallel ranks see the same loss of the same whole rows,
    each backpropagates through its own tokens, and the first of them counts the tokens."""

    def reduce(
        microbatch: Microbatch, hidden: Tensor, layer: Head
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        batch = microbatch.batch
        output = _policy_output(hidden, microbatch, layer, loss.needs, batch.trained)
        per_token, metrics = loss(output, batch)
        _check_shapes({"loss": per_token, **metrics}, batch)
        share = (batch.weights * per_token).sum()
        sums = {
            name: reduce_tokens(metric.detach(), batch, loss.reductions.get(name, "mean"))
            for name, metric in metrics.items()
        }
        sums["loss"] = share.detach().clone()  # the schedules change the loss in place
        tokens = microbatch.tokens if world.context_rank == 0 else 0
        counted = torch.tensor(tokens, dtype=torch.int, device=hidden.device)
        return share * total_tokens, counted, sums

    parts = _run(model, microbatches, reduce, False, routing)
    return _combined(parts, world, loss.reductions)


@torch.no_grad()
def route(
    model: Sequence[MegatronModule], microbatches: Sequence[Microbatch], routing: ExpertChoice
) -> None:
    """A pass for nothing but the experts that it chooses."""
    nothing = torch.zeros((), device=device())
    _run(model, microbatches, lambda *_: (nothing, nothing.int(), None), True, routing)


@torch.no_grad()
def score(
    model: Sequence[MegatronModule],
    world: World,
    batch: Batch,
    limits: MicrobatchLimits,
    want: Sequence[str],
    top_k: int = 0,
    below: int = 0,
    routing: ExpertChoice | None = None,
) -> dict[str, Tensor]:
    """{name: (B, T) float32 on the CPU} for what is wanted, the same on all ranks; with `top_k`
    also `top_ids` and `top_logprobs` (B, T, k), of ids below `below`."""
    microbatches = plan(batch, limits, world)

    def collect(
        microbatch: Microbatch, hidden: Tensor, layer: Head
    ) -> tuple[Tensor, Tensor, tuple[list[int], dict[str, Tensor]]]:
        values: dict[str, Tensor] = {}
        wanted = microbatch.batch.wanted
        if top_k:
            assert isinstance(layer, OutputLayer)  # a critic is never asked for tokens
            # For their log-probs the output layer runs once more: they go the way of all
            values["top_ids"] = microbatch.batch.extras[TEACHER_TOP_IDS] = top_tokens(
                hidden,
                microbatch.batch.lengths,
                top_k,
                layer=layer,
                places=microbatch.feed.places,
                below=below,
                wanted=wanted,
            )
        needs = frozenset(want) | ({"top_logprobs"} if top_k else set())
        output = _policy_output(hidden, microbatch, layer, needs, wanted)
        values |= {name: getattr(output, name) for name in needs}
        nothing = torch.zeros((), device=hidden.device)
        return nothing, nothing.int(), (microbatch.rows, values)

    parts = _run(model, microbatches, collect, True, routing)
    answers = {}
    for name, empty in empty_scores(batch, want, top_k).items():
        whole = empty.to(device())
        for rows, values in parts:
            if rows:
                whole[rows, : values[name].shape[1]] = values[name]
        answers[name] = _everywhere(whole, world).cpu()
    return answers


def _take(batch: Batch, rows: list[int]) -> Batch:
    """The rows; without any, a row that weighs nothing."""
    taken = batch.select(rows or [0])
    if not rows:
        taken = taken.replace(weights=torch.zeros_like(taken.weights))
    return taken


def _check_shapes(values: dict[str, Tensor], batch: Batch) -> None:
    for name, value in values.items():
        if value.shape != batch.tokens.shape:
            raise RLFlowError(
                f"loss: '{name}' has shape {tuple(value.shape)}; a loss and its metrics are (rows, "
                f"tokens) = {tuple(batch.tokens.shape)}, not yet summed: `Batch.weights` does that."
            )


def _policy_output(
    hidden: Tensor,
    microbatch: Microbatch,
    layer: Head,
    want: frozenset[str],
    wanted: Tensor | None,
) -> PolicyOutput:
    """What the head on the last hidden states gives: a critic's values, else log-probs and what is
    wanted besides."""
    batch, places = microbatch.batch, microbatch.feed.places
    if isinstance(layer, ValueHead):
        values = token_values(hidden, batch.lengths, head=layer, places=places, wanted=wanted)
        return PolicyOutput(logprobs=torch.full_like(values, torch.nan), values=values)
    logprobs, entropy, top_logprobs = token_logprobs(
        hidden,
        batch.tokens,
        batch.lengths,
        batch.temperatures,
        layer=layer,
        want_entropy="entropy" in want,
        places=places,
        wanted=wanted,
        others=teacher_top_ids(batch) if "top_logprobs" in want else None,
    )
    return PolicyOutput(logprobs=logprobs, entropy=entropy, top_logprobs=top_logprobs)


def _run(
    model: Sequence[MegatronModule],
    microbatches: Sequence[Microbatch],
    reduce: Callable[[Microbatch, Tensor, Head], tuple[Tensor, Tensor, Any]],
    forward_only: bool,
    routing: ExpertChoice | None = None,
) -> list[Any]:
    """What `reduce` gave third for each micro-batch, in order; empty on all but the last pipeline
    stage."""

    @native
    def forward(iterator: Iterator[Microbatch], module: MegatronModule) -> tuple[Tensor, Callable]:
        microbatch = next(iterator)
        feed = microbatch.feed
        if routing is not None:
            routing.begin(unwrap_model(module), microbatch.batch, feed)
        output = module(
            feed.tokens,
            position_ids=None,
            attention_mask=None,
            packed_seq_params=feed.segments,
            padding_mask=microbatch.padding,
        )
        if routing is not None:
            routing.end(unwrap_model(module), microbatch.rows, feed)
        return output, native(
            lambda hidden: reduce(microbatch, hidden, unwrap_model(module).head())
        )

    chunks = [unwrap_model(module) for module in model]
    widest = max(microbatch.feed.width for microbatch in microbatches)
    try:
        parts: list[Any] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(microbatches) for _ in model],
            model=list(model),
            num_microbatches=len(microbatches),
            # Of all where chunks interleave; else a hint, the stages tell each other their shapes
            seq_length=widest,
            micro_batch_size=1,
            forward_only=forward_only,
        )
    except BaseException:  # a loss that raises must not leave routers with half a batch
        forget(chunks)
        raise
    if routing is not None:
        routing.finish(chunks, len(microbatches))
    return parts


def _combined(
    parts: list[dict[str, Tensor]], world: World, reductions: Mapping[str, Reduction]
) -> dict[str, float]:
    """Metrics over micro-batches and data-parallel ranks, known to every pipeline stage: maxima,
    and sums of all others."""
    names = sorted(parts[0]) if parts else []
    for part in parts:
        if sorted(part) != names:
            raise RLFlowError(
                f"loss: metrics differ between micro-batches, {names} and {sorted(part)}."
            )
    result: list[dict[str, float]] = [{}]
    if parts:
        each = torch.stack([torch.stack([part[name].double() for name in names]) for part in parts])
        values, maxima = each.sum(0), each.amax(0)
        if world.data_parallel > 1:
            dist.all_reduce(values, group=world.data_group)
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=world.data_group)
        found = zip(names, values.tolist(), maxima.tolist(), strict=True)
        result = [
            {name: most if reductions.get(name) == "max" else total for name, total, most in found}
        ]
    if world.pipeline_parallel > 1:
        last = world.pipeline_parallel - 1
        dist.broadcast_object_list(result, group=world.pipeline_group, group_src=last)
    return result[0]


def _everywhere(values: Tensor, world: World) -> Tensor:
    """Puts together the rows of all data-parallel ranks (0 where another rank's) and shows them to
    every stage."""
    if world.data_parallel > 1 and world.last_stage:
        dist.all_reduce(values, group=world.data_group)
    return world.from_stage(world.pipeline_parallel - 1, values)
