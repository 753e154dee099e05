"""Megatron's linear layers over `rlflow.matmul`; the gradients of their weights go straight into Megatron's buffers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.distributed import ProcessGroup

from rlflow import matmul as products


def _forward(
    self: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: ProcessGroup,
    **_: Any,
) -> Tensor:
    return _Linear.apply(input, weight, bias, tp_group, allreduce_dgrad, sequence_parallel)


class ColumnLinear(ColumnParallelLinear):
    """Megatron's, with the products above."""

    _forward_impl = _forward


class RowLinear(RowParallelLinear):
    """Megatron's, with the products above."""

    _forward_impl = _forward


class _Linear(torch.autograd.Function):
    """inputs (..., in) @ weight.T + bias. Under sequence parallelism the inputs are split over ranks by their first dimension
    and gathered twice, as in Megatron: kept for the backward pass is this rank's part."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: ProcessGroup,
        sum_gradient: bool,
        gather: bool,
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.group, ctx.sum_gradient, ctx.gather, ctx.biased = group, sum_gradient, gather, bias is not None
        whole = _gathered(inputs, group) if gather else inputs
        return products.linear(whole.flatten(0, -2), weight, bias).view(*whole.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        whole = _gathered(inputs, ctx.group) if ctx.gather else inputs
        flat = gradient.flatten(0, -2)
        of_inputs = products.linear(flat, weight.t()).view(whole.shape)
        if ctx.gather:
            whole_gradient, of_inputs = of_inputs, torch.empty_like(inputs)
            dist.reduce_scatter_tensor(of_inputs, whole_gradient, group=ctx.group)
        elif ctx.sum_gradient:
            dist.all_reduce(of_inputs, group=ctx.group)
        main_grad = getattr(weight, "main_grad", None)
        total = torch.zeros_like(weight) if main_grad is None else main_grad
        products.accumulate(total, flat, whole.flatten(0, -2))
        of_bias = flat.sum(dim=0) if ctx.biased else None
        return of_inputs, total if main_grad is None else None, of_bias, None, None, None


def _gathered(part: Tensor, group: ProcessGroup) -> Tensor:
    whole = part.new_empty(part.shape[0] * group.size(), *part.shape[1:])
    dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return whole
