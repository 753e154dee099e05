"""Log-probs and entropies from vocabulary-parallel logits: only (rows, tokens) numbers cross ranks, never logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from rlflow.trainer.megatron.packing import Packing

CHUNK_ELEMENTS = 1 << 18  # 1 MiB of float32: what a CPU core's cache holds
CHUNK_ELEMENTS_CUDA = 1 << 26  # a GPU wants few, large operations


def token_logprobs(
    logits: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    temperatures: Tensor,
    *,
    vocab: int,
    group: ProcessGroup,
    want_entropy: bool = False,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each token and, if wanted, the entropy of the distribution that it was drawn from: (B, T), float32, nats.

    logits (B, T, part of the padded vocabulary), or (1, N, ...) for packed rows; tokens (B, T); lengths, temperatures (B,),
    a temperature of 0 (greedy) counts as 1. Position t describes token t, so position 0 and padding are 0. Padded
    vocabulary has no probability."""
    width = tokens.shape[1]
    targets = F.pad(tokens[:, 1:], (0, 1))  # the logits at t - 1 predict token t
    scale = torch.where(temperatures > 0, temperatures, torch.ones_like(temperatures)).unsqueeze(1).expand_as(targets)
    if packing is not None:
        targets, scale = packing.gather(targets), packing.gather(scale)
    logprobs, entropy = _VocabParallelLogprobs.apply(logits, targets, scale, vocab, group, want_entropy)
    positions = torch.arange(width, device=tokens.device)
    valid = (positions >= 1) & (positions < lengths.unsqueeze(1))

    def described(values: Tensor) -> Tensor:
        if packing is not None:
            values = packing.scatter(values)
        return F.pad(values[:, :-1], (1, 0)).masked_fill(~valid, 0.0)

    return described(logprobs), described(entropy) if want_entropy else None


class _VocabParallelLogprobs(torch.autograd.Function):
    """log p(target) = z_target - log sum exp z and H = log sum exp z - sum p z, with z = logits / temperature.

    Gradients: d log p(target) / d z_j = [j = target] - p_j and d H / d z_j = -p_j (log p_j + H). Works on `CHUNK_ELEMENTS`
    at a time, so that intermediate values stay in the cache; where no gradient is needed nothing of the logits' size is
    made. N positions, V columns of the vocabulary on this rank."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, scale: Tensor, vocab: int, group: ProcessGroup, want_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        part = logits.shape[-1]
        start = group.rank() * part
        columns = min(max(vocab - start, 0), part)  # the rest is padding
        flat = logits.detach().flatten(0, -2)[:, :columns]
        scale = scale.flatten().unsqueeze(1)  # (N, 1)
        here = ((targets >= start) & (targets < start + columns)).flatten()
        index = (targets.flatten() - start).masked_fill(~here, 0).unsqueeze(1)

        peak = flat.new_full(scale.shape, -torch.inf, dtype=torch.float32)
        if columns:
            peak = flat.amax(dim=1, keepdim=True).float() / scale
        peak = _reduced(peak, group, dist.ReduceOp.MAX)
        keep = ctx.needs_input_grad[0]
        exponents = torch.empty(flat.shape if keep else (0, 0), dtype=torch.float32, device=flat.device)
        sums = torch.zeros(3, flat.shape[0], device=flat.device)  # sum exp z, z of the target, sum z exp z
        for rows in _chunks(flat.shape[0], columns):
            shifted = (flat[rows] / scale[rows]).float().sub_(peak[rows])
            sums[1, rows] = shifted.gather(1, index[rows]).squeeze(1) * here[rows]
            exponent = torch.exp(shifted, out=exponents[rows]) if keep else shifted.exp()
            sums[0, rows] = exponent.sum(dim=1)
            if want_entropy:
                sums[2, rows] = shifted.mul_(exponent).sum(dim=1)
        total, target, weighted = _reduced(sums, group, dist.ReduceOp.SUM)
        normalizer = total.log()
        entropy = normalizer - weighted / total
        ctx.save_for_backward(exponents, index, here, scale, total, entropy)
        ctx.shape, ctx.dtype, ctx.want_entropy = logits.shape, logits.dtype, want_entropy
        return (target - normalizer).view(targets.shape), entropy.view(targets.shape)

    @staticmethod
    def backward(ctx: Any, of_logprob: Tensor, of_entropy: Tensor) -> tuple[Tensor | None, ...]:
        exponents, index, here, scale, total, entropy = ctx.saved_tensors
        columns = exponents.shape[1]
        of_logprob, of_entropy = of_logprob.flatten(), of_entropy.flatten()
        share = -of_logprob / total
        if ctx.want_entropy:
            # With p = e / total: -p (log p + H) = -(e log e + e (H - log total)) / total.
            share = share - of_entropy * (entropy - total.log()) / total
            of_surprise = (-of_entropy / total).unsqueeze(1) / scale
        share = share.unsqueeze(1) / scale
        at_target = (of_logprob * here).unsqueeze(1) / scale
        allocate = torch.zeros if columns < ctx.shape[-1] else torch.empty
        gradient = allocate(len(total), ctx.shape[-1], dtype=ctx.dtype, device=total.device)
        for rows in _chunks(len(total), columns):
            exponent = exponents[rows]
            chunk = exponent * share[rows]
            if ctx.want_entropy:
                chunk.addcmul_(torch.xlogy(exponent, exponent), of_surprise[rows])
            chunk.scatter_add_(1, index[rows], at_target[rows])
            gradient[rows, :columns] = chunk
        return gradient.view(ctx.shape), None, None, None, None, None


def _chunks(rows: int, columns: int) -> Iterator[slice]:
    """Slices of about CHUNK_ELEMENTS elements; none where there are no columns."""
    if columns:
        elements = CHUNK_ELEMENTS_CUDA if torch.cuda.is_available() else CHUNK_ELEMENTS
        size = max(1, elements // columns)
        yield from (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def _reduced(values: Tensor, group: ProcessGroup, operation: dist.ReduceOp.RedOpType) -> Tensor:
    if group.size() > 1:
        dist.all_reduce(values, operation, group=group)
    return values
