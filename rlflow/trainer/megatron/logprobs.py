"""The output layer fused with log-softmax: hidden states -> log-probs and entropies, a chunk of the
logits at a time.

Only (positions,) numbers cross ranks, never logits; and no more logits exist at once than
`OutputLayer.chunk_bytes` allows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from rlflow.devices.matmul import accumulate, linear, linear_float32

CACHE_ELEMENTS = 1 << 18  # 1 MiB of float32: what a CPU core's cache holds
CACHE_ELEMENTS_CUDA = 1 << 26  # a GPU wants few, large operations


@dataclass(frozen=True)
class OutputLayer:
    """The projection to this rank's part of the padded vocabulary: `weight` (columns, hidden), with
    or without `main_grad`.

    `vocab`: size without padding; padded columns get no probability. `chunk_bytes`: of float32
    logits at a time."""

    weight: Tensor
    vocab: int
    group: ProcessGroup
    context_group: ProcessGroup
    sequence_parallel: bool
    chunk_bytes: int


def token_logprobs(
    hidden: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    temperatures: Tensor,
    *,
    layer: OutputLayer,
    places: Tensor,
    want_entropy: bool = False,
    wanted: Tensor | None = None,
    others: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Log-prob of each token and, if wanted, the entropy of the distribution that it was drawn
    from: (B, T), float32, nats; and (B, T, k) log-probs of `others`, further ids (B, T, k) in each
    token's place.

    hidden (tokens, rows, hidden) as the model was fed; split over ranks by the first dimension
    under sequence parallelism. tokens (B, T); places (B, T): the index of each token's hidden
    state, or -1 where another rank of the layer's `context_group` has it. lengths, temperatures
    (B,), a temperature of 0 (greedy) counts as 1. wanted (B, T) bool: the tokens to describe, all
    by default. Position t describes token t, so position 0 and padding are 0, as is what is not
    wanted: no logits are computed for them."""
    predicting, valid, index = _predicting(hidden, lengths, layer, places, wanted)
    scale = torch.where(temperatures > 0, temperatures, 1.0).unsqueeze(1).expand_as(valid)
    targets = (
        tokens[:, 1:, None]
        if others is None
        else torch.cat([tokens[..., None], others], dim=-1)[:, 1:]
    )
    targets, scale = targets.flatten(0, 1)[index], scale.flatten()[index]
    logprobs, entropy = _OutputLogprobs.apply(
        predicting, layer.weight, targets, scale, layer, want_entropy
    )
    return (
        at_tokens(logprobs[:, 0], valid, layer.context_group),
        at_tokens(entropy, valid, layer.context_group) if want_entropy else None,
        at_tokens(logprobs[:, 1:], valid, layer.context_group) if others is not None else None,
    )


@torch.no_grad()
def top_tokens(
    hidden: Tensor,
    lengths: Tensor,
    count: int,
    *,
    layer: OutputLayer,
    places: Tensor,
    below: int,
    wanted: Tensor | None = None,
) -> Tensor:
    """(B, T, count) the likeliest ids below `below` in the place of each token, the likeliest
    first; 0 as in `token_logprobs`."""
    predicting, valid, _ = _predicting(hidden, lengths, layer, places, wanted)
    found = torch.empty(len(predicting), count, dtype=torch.int64, device=hidden.device)
    part, rank = len(layer.weight), layer.group.rank()
    for rows in _slices(len(predicting), max(1, layer.chunk_bytes // (4 * part))):
        logits = linear_float32(predicting[rows], layer.weight)
        logits[:, _columns(layer, part, below) :] = -torch.inf
        values, ids = logits.topk(min(count, part), dim=1)
        values, ids = _gathered(values, layer.group), _gathered(ids + rank * part, layer.group)
        found[rows] = ids.gather(1, values.topk(count, dim=1).indices)
    return at_tokens(found, valid, layer.context_group)


def _predicting(
    hidden: Tensor,
    lengths: Tensor,
    layer: OutputLayer,
    places: Tensor,
    wanted: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(N, hidden) the hidden states that predict a token to describe, (B, T - 1) which of tokens 1
    to T - 1 those are, and (N,) their places among all of these."""
    if layer.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=True, group=layer.group
        )
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden, group=layer.group)
    valid = predicted_here(lengths, places, wanted)
    index = valid.flatten().nonzero().squeeze(1)  # the one look at a size per micro-batch
    states = hidden.flatten(0, 1).index_select(0, places[:, :-1].flatten()[index])
    return states, valid, index


def predicted_here(lengths: Tensor, places: Tensor, wanted: Tensor | None) -> Tensor:
    """(B, T - 1) bool: whether hidden state t, which describes token t + 1, is this
    context-parallel rank's and wanted."""
    positions = torch.arange(1, places.shape[1], device=places.device)
    valid = (positions < lengths.unsqueeze(1)) & (places[:, :-1] >= 0)
    return valid if wanted is None else valid & wanted[:, 1:]


def at_tokens(values: Tensor, valid: Tensor, context_group: ProcessGroup) -> Tensor:
    """(B, T, ...) on every context-parallel rank: the values (N, ...) of each one's `valid` hidden
    states (B, T - 1) at the tokens that they describe, 0 elsewhere."""
    further = values.shape[1:]
    spread = valid.reshape(*valid.shape, *(1 for _ in further)).expand(*valid.shape, *further)
    here = F.pad(
        values.new_zeros(spread.shape).masked_scatter(spread, values),
        (*(0 for _ in 2 * further), 1, 0),
    )
    # The sum; each rank's gradient its own
    return reduce_from_tensor_model_parallel_region(here, group=context_group)


class _OutputLogprobs(torch.autograd.Function):
    """log p(target) = z_target - log sum exp z and H = log sum exp z - sum p z, with z = hidden @
    weight.T / temperature; of several targets (N, m) at each position.

    Gradients: d log p(target) / d z_j = [j = target] - p_j and d H / d z_j = -p_j (log p_j + H).
    The exponentials of the last chunk are kept for the backward pass, which begins there; those of
    the chunks before it are computed again. Within a chunk, work goes on in place and a cache's
    size at a time. N positions, V columns of the vocabulary on this rank."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        scale: Tensor,
        layer: OutputLayer,
        want_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        size = max(1, layer.chunk_bytes // (4 * len(weight)))
        answers = torch.empty(3, len(hidden), dtype=torch.float32, device=hidden.device)
        logprobs = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        exponents = None
        for rows in _slices(len(hidden), size):
            exponents = None  # not two chunks at a time
            exponents = linear_float32(hidden[rows], weight)
            _soften(
                exponents,
                targets[rows],
                scale[rows],
                layer,
                want_entropy,
                answers[:, rows],
                logprobs[rows],
            )
        ctx.save_for_backward(hidden, weight, targets, scale, answers)
        ctx.layer, ctx.size = layer, size
        # An entropy that is only reported has no gradient: None, not zeros
        ctx.set_materialize_grads(False)
        ctx.kept = exponents if any(ctx.needs_input_grad) else None
        return logprobs, answers[0].clone()

    @staticmethod
    def backward(
        ctx: Any, of_logprob: Tensor | None, of_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, scale, answers = ctx.saved_tensors
        of_logprob = (
            torch.zeros(targets.shape, device=answers.device) if of_logprob is None else of_logprob
        )
        # Overwritten here; a second backward pass computes all chunks again
        kept, ctx.kept = ctx.kept, None
        # Under Megatron's DDP the gradient goes straight into its float32 buffer: no copy, no
        # rounding between chunks.
        main_grad = getattr(weight, "main_grad", None)
        of_weight = None  # of a frozen layer
        if ctx.needs_input_grad[1]:
            of_weight = (
                torch.zeros_like(weight, dtype=torch.float32) if main_grad is None else main_grad
            )
        of_hidden = torch.empty_like(hidden)
        for rows in reversed(_slices(len(hidden), ctx.size)):
            total = answers[2, rows]
            if kept is None:
                kept, total = linear_float32(hidden[rows], weight), torch.ones_like(total)
                _normalize(kept, scale[rows], answers[1, rows], ctx.layer)
            entropy = None if of_entropy is None else (answers[0, rows], of_entropy[rows])
            _differentiate(
                kept, targets[rows], scale[rows], total, ctx.layer, of_logprob[rows], entropy
            )
            of_logits = kept.to(weight.dtype)
            kept = None
            of_hidden[rows] = linear(of_logits, weight.t())
            if of_weight is not None:
                accumulate(of_weight, of_logits, hidden[rows])
            del of_logits  # before the next chunk is made
        answer = None if of_weight is None or main_grad is not None else of_weight.to(weight.dtype)
        return of_hidden, answer, None, None, None, None


def _soften(
    logits: Tensor,
    targets: Tensor,
    scale: Tensor,
    layer: OutputLayer,
    want_entropy: bool,
    answers: Tensor,
    logprobs: Tensor,
) -> None:
    """Turns logits (n, V) into exp(z - largest z) in place. `answers` (3, n) get H, log sum exp z,
    and the sum of the exponentials; `logprobs` (n, m) log p of each target."""
    index, here, columns = _local(targets, layer, logits.shape[1])
    logits[:, columns:] = -torch.inf
    scale = scale.unsqueeze(1)
    peak = logits.new_full((len(logits), 1), -torch.inf)
    if columns:
        peak = logits.amax(dim=1, keepdim=True).div_(scale)
    peak = _reduced(peak, layer.group, dist.ReduceOp.MAX)
    # Sum exp z, sum z exp z, z of each target; z less its peak
    sums = logits.new_zeros(2 + targets.shape[1], len(logits))
    pass_over = one_kernel(_exponentiate, logits)
    for rows in _slices(len(logits), _cached(logits)):
        at_targets, weighted_sum, sum_of_rows = pass_over(
            logits[rows], index[rows], scale[rows], peak[rows], columns if want_entropy else 0
        )
        sums[2:, rows] = at_targets.masked_fill_(~here[rows], 0.0).t()
        sums[1, rows] = weighted_sum
        sums[0, rows] = sum_of_rows
    total, weighted, *of_targets = _reduced(sums, layer.group, dist.ReduceOp.SUM)
    torch.sub(torch.stack(of_targets, dim=1), total.log().unsqueeze(1), out=logprobs)
    torch.sub(total.log(), weighted / total, out=answers[0])
    torch.add(total.log(), peak.squeeze(1), out=answers[1])
    answers[2] = total


def _exponentiate(
    logits: Tensor, index: Tensor, scale: Tensor, peak: Tensor, columns: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Turns logits (n, V) into exp(z - peak) in place; returns z - peak at `index` (n, m), the sum
    of (z - peak) exp(z - peak) over the first `columns`, and the sum of the exponentials."""
    shifted = logits.div_(scale).sub_(peak)
    at_index = shifted.gather(1, index)
    weighted = shifted.new_zeros(len(shifted))
    if columns:
        exponents = shifted.exp()
        weighted = shifted[:, :columns].mul_(exponents[:, :columns]).sum(dim=1)
        shifted.copy_(exponents)
    else:
        shifted.exp_()
    return at_index, weighted, shifted.sum(dim=1)


def _slope(
    exponents: Tensor, index: Tensor, share: Tensor, at_index: Tensor, of_surprise: Tensor | None
) -> None:
    """Turns exponentials e (n, V) into share * e + of_surprise * e log e in place, and adds
    `at_index` (n, m) at `index`."""
    if of_surprise is None:
        exponents.mul_(share)
    else:
        surprise = torch.xlogy(exponents, exponents)
        exponents.mul_(share).addcmul_(surprise, of_surprise)
    exponents.scatter_add_(1, index, at_index)


def one_kernel(function: Callable[..., Any], values: Tensor) -> Callable[..., Any]:
    """The function, on a GPU compiled: all its operations in as few passes over memory as there can
    be."""
    return _compiled(function) if values.is_cuda else function


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def _normalize(logits: Tensor, scale: Tensor, normalizer: Tensor, layer: OutputLayer) -> None:
    """Turns logits (n, V) into probabilities in place, with the log sum exp z that is known
    already."""
    logits[:, _columns(layer, logits.shape[1]) :] = -torch.inf
    for rows in _slices(len(logits), _cached(logits)):
        logits[rows].div_(scale[rows].unsqueeze(1)).sub_(normalizer[rows].unsqueeze(1)).exp_()


def _differentiate(
    exponents: Tensor,
    targets: Tensor,
    scale: Tensor,
    total: Tensor,
    layer: OutputLayer,
    of_logprob: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
) -> None:
    """Turns p * total (n, V) into the gradient of the logits in place. `entropy`: its value and its
    gradient."""
    index, here, _ = _local(targets, layer, exponents.shape[1])
    share = -of_logprob.sum(dim=1) / total
    of_surprise = None
    if entropy is not None:
        # With p = e / total: -p (log p + H) = -(e log e + e (H - log total)) / total.
        value, of_entropy = entropy
        share = share - of_entropy * (value - total.log()) / total
        of_surprise = (-of_entropy / total / scale).unsqueeze(1)
    share = (share / scale).unsqueeze(1)
    at_target = of_logprob * here / scale.unsqueeze(1)
    pass_over = one_kernel(_slope, exponents)
    for rows in _slices(len(exponents), _cached(exponents)):
        surprise = None if of_surprise is None else of_surprise[rows]
        pass_over(exponents[rows], index[rows], share[rows], at_target[rows], surprise)


def _local(targets: Tensor, layer: OutputLayer, part: int) -> tuple[Tensor, Tensor, int]:
    """(n, m) column of each target on this rank (0 where it is elsewhere), (n, m) whether it is
    here, and `_columns`."""
    columns = _columns(layer, part)
    index = targets - layer.group.rank() * part
    here = (index >= 0) & (index < columns)
    return index.masked_fill(~here, 0), here, columns


def _columns(layer: OutputLayer, part: int, vocab: int | None = None) -> int:
    """How many of this rank's columns are vocabulary; the rest is padding."""
    vocab = layer.vocab if vocab is None else vocab
    return min(max(vocab - layer.group.rank() * part, 0), part)


def _cached(values: Tensor) -> int:
    """Rows whose elements fit the cache."""
    return max(1, (CACHE_ELEMENTS_CUDA if values.is_cuda else CACHE_ELEMENTS) // values.shape[1])


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, length, size)]


def _gathered(values: Tensor, group: ProcessGroup) -> Tensor:
    """(n, k) on each rank -> (n, k * ranks)."""
    if group.size() == 1:
        return values
    parts = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(parts, values.contiguous(), group=group)
    return torch.cat(parts, dim=1)


def _reduced(values: Tensor, group: ProcessGroup, operation: dist.ReduceOp.RedOpType) -> Tensor:
    if group.size() > 1:
        dist.all_reduce(values, operation, group=group)
    return values
