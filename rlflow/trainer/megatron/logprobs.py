"""Log-probs and entropies from vocabulary-parallel logits: only (rows, tokens) numbers cross ranks, never logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup


def token_logprobs(
    logits: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    temperatures: Tensor,
    *,
    vocab: int,
    group: ProcessGroup,
    want_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each token and, if wanted, the entropy of the distribution that it was drawn from: (B, T), float32, nats.

    logits (B, T, part of the padded vocabulary); tokens (B, T); lengths, temperatures (B,), a temperature of 0 (greedy)
    counts as 1. Position t describes token t, so position 0 and padding are 0. Padded vocabulary has no probability."""
    width = tokens.shape[1]
    targets = F.pad(tokens[:, 1:], (0, 1))  # the logits at t - 1 predict token t
    scale = torch.where(temperatures > 0, temperatures, torch.ones_like(temperatures))
    logprobs, entropy = _VocabParallelLogprobs.apply(logits, targets, scale, vocab, group, want_entropy)
    positions = torch.arange(width, device=tokens.device)
    valid = (positions >= 1) & (positions < lengths.unsqueeze(1))

    def described(values: Tensor) -> Tensor:
        return F.pad(values[:, :-1], (1, 0)).masked_fill(~valid, 0.0)

    return described(logprobs), described(entropy) if want_entropy else None


class _VocabParallelLogprobs(torch.autograd.Function):
    """log p(target) = z_target - log sum exp z and H = log sum exp z - sum p z, with z = logits / temperature.

    Gradients: d log p(target) / d z_j = [j = target] - p_j and d H / d z_j = -p_j (log p_j + H)."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, scale: Tensor, vocab: int, group: ProcessGroup, want_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        part = logits.shape[-1]
        start = group.rank() * part
        scaled = logits.float() / scale.view(-1, 1, 1)
        if start + part > vocab:
            scaled[..., max(vocab - start, 0) :] = -torch.inf
        peak = _reduced(scaled.amax(dim=-1), group, dist.ReduceOp.MAX)
        scaled -= peak.unsqueeze(-1)
        here = (targets >= start) & (targets < start + part)
        index = (targets - start).masked_fill(~here, 0).unsqueeze(-1)
        target = scaled.gather(-1, index).squeeze(-1).masked_fill(~here, 0.0)
        weighted = torch.zeros_like(target)
        if want_entropy:
            exponents = scaled.exp()
            weighted = (exponents * scaled.clamp(min=-1e30)).sum(dim=-1)  # finite: 0 * -inf would be NaN
        else:
            exponents = scaled.exp_()
        sums = torch.stack([exponents.sum(dim=-1), target, weighted])
        total, target, weighted = _reduced(sums, group, dist.ReduceOp.SUM)
        normalizer = total.log()
        entropy = normalizer - weighted / total
        probabilities = exponents.div_(total.unsqueeze(-1))
        ctx.save_for_backward(probabilities, index, here, scale, entropy)
        ctx.dtype, ctx.want_entropy = logits.dtype, want_entropy
        return target - normalizer, entropy

    @staticmethod
    def backward(ctx: Any, logprob_gradient: Tensor, entropy_gradient: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, index, here, scale, entropy = ctx.saved_tensors
        gradient = probabilities * -logprob_gradient.unsqueeze(-1)
        gradient.scatter_add_(-1, index, (logprob_gradient * here).unsqueeze(-1))
        if ctx.want_entropy:
            surprise = torch.xlogy(probabilities, probabilities) + probabilities * entropy.unsqueeze(-1)
            gradient -= surprise * entropy_gradient.unsqueeze(-1)
        gradient /= scale.view(-1, 1, 1)
        return gradient.to(ctx.dtype), None, None, None, None, None


def _reduced(values: Tensor, group: ProcessGroup, operation: dist.ReduceOp.RedOpType) -> Tensor:
    if group.size() > 1:
        dist.all_reduce(values, operation, group=group)
    return values
