"""Layer parts on plain torch, for where Transformer Engine is not installed: norm and attention
anywhere, and on CPUs also what it fuses on GPUs (SwiGLU, rotary embedding, linear layers): fewer
passes over memory, fewer tensors kept for the backward pass, and gradients of weights that go
straight into Megatron's buffers."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.distributed import ProcessGroup

from rlflow.devices import matmul as products
from rlflow.trainer.megatron.context import (
    Segments,
    gather_tokens,
    held_chunks,
    packed_positions,
)

varlen_attn: Callable[..., Any] | None = None
"""torch's attention over rows of variable lengths, where it takes windows (from 2.11): for GPUs,
and left out elsewhere, as it brings torch's compiler (a second of the import)."""
varlen_options: frozenset[str] = frozenset()
"""What it can be told. Its kernel takes grouped queries as they are: 2.13 wants to be told of them
(enable_gqa), 2.11 has no word for it."""
if torch.cuda.is_available():
    with contextlib.suppress(ImportError):
        from torch.nn.attention import varlen

        varlen_options = frozenset(inspect.signature(varlen.varlen_attn).parameters)
        if "window_size" in varlen_options:
            varlen_attn = varlen.varlen_attn


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the constructor and the parameter mark that Megatron's layers expect of
    a norm. Zero-centered ones multiply by 1 + weight, in float32."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) -> (..., hidden)."""
        if not self._zero_centered:
            return super().forward(x)
        normed = F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps)
        return normed.to(x.dtype)


def normalize_output(linear: MegatronModule, config: TransformerConfig) -> None:
    """Makes a norm of a linear layer's output a part of it, as Megatron-Bridge names it. Adapters of
    the layer are added before."""
    linear.post_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
    linear.register_forward_hook(_output_normalized)


def _output_normalized(
    linear: Any, _: tuple[Tensor, ...], answer: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    output, bias = answer
    return linear.post_layernorm(output), bias


def scale_output(embedding: MegatronModule, factor: float) -> None:
    """Multiplies an embedding's output by the factor, rounded to its dtype as transformers does."""
    embedding.register_forward_hook(
        lambda _, __, embedded: embedded * torch.tensor(factor, dtype=embedded.dtype).item()
    )


class TorchAttention(MegatronModule):
    """Causal attention by torch's scaled_dot_product_attention, grouped queries and windows
    included.

    megatron-core's own DotProductAttention takes 4 times the time and 6 times the memory at 2,048
    tokens on a CPU, and knows neither packed rows nor context parallelism. Under that, each rank
    gathers the keys and values of all: over gloo one collective costs less than a ring. (With
    Transformer Engine its own attention runs instead: not run yet.)"""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self._context_group = pg_collection.cp
        self._scale = softmax_scale
        # Megatron's does not count the token itself
        self._window = config.window_size[0] + 1 if has_window(config, layer_number) else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **__: Any,
    ) -> Tensor:
        """(tokens, rows, heads, head_dim) each, keys and values with fewer heads, values of another
        size where attention is latent -> (tokens, rows, heads * value's head_dim).

        Packed, without the dimension of the rows: each segment attends to itself alone."""
        ranks = self._context_group.size()
        if packed_seq_params is None:
            if ranks == 1:
                return _attend(query, key, value, self._scale, self._window)
            return self._attend_over_ranks(query, key, value, [query.shape[0] * ranks])
        flash = query.is_cuda and query.dtype is torch.bfloat16 and self._scale is None
        if ranks == 1 and varlen_attn is not None and flash:
            bounds, longest = packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q
            return _attend_packed(query, key, value, bounds, longest, self._window)
        assert isinstance(packed_seq_params, Segments)
        lengths = packed_seq_params.lengths
        query, key, value = (part.unsqueeze(1) for part in (query, key, value))
        if ranks > 1:
            return self._attend_over_ranks(query, key, value, lengths).squeeze(1)
        segments = zip(*(part.split(lengths) for part in (query, key, value)), strict=True)
        attended = [_attend(q, k, v, self._scale, self._window) for q, k, v in segments]
        return torch.cat(attended).squeeze(1)

    def _attend_over_ranks(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int]
    ) -> Tensor:
        """This rank's queries against the keys and values of all context-parallel ranks. lengths:
        of whole segments."""
        group = self._context_group
        both = gather_tokens(torch.cat([key, value], dim=3), lengths, group)
        key, value = both.split([key.shape[3], value.shape[3]], dim=3)
        parts = [
            _attend(
                query[chunk.here],
                key[chunk.start : chunk.stop],
                value[chunk.start : chunk.stop],
                self._scale,
                self._window,
            )
            for chunk in held_chunks(lengths, group.size(), group.rank())
        ]
        return torch.cat(parts)


def has_window(config: TransformerConfig, layer_number: int) -> bool:
    """Whether a layer, counted from 1, looks back on a window."""
    return is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)


def _attend_packed(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, window: int | None
) -> Tensor:
    """Causal attention within each of the rows that lie between `bounds`, in one call of torch's
    flash attention for variable lengths (bfloat16, GPUs): (tokens, heads, head_dim) -> (tokens,
    heads * head_dim). window: as of `_attend`."""
    assert varlen_attn is not None
    grouped = {"enable_gqa": query.shape[1] != key.shape[1]}
    options = grouped if "enable_gqa" in varlen_options else {}
    mixed = varlen_attn(
        query,
        key,
        value,
        bounds,
        bounds,
        longest,
        longest,
        window_size=(-1 if window is None else window - 1, 0),
        **options,
    )
    packed: Tensor = mixed.flatten(1)
    return packed


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention of the last of the keys' tokens: the last query sees every key. scale: of
    the scores, None for that of the queries' size. window: each query sees so many keys at most,
    its own the last."""
    queries, keys = query.shape[0], key.shape[0]
    query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
    hides = window is not None and window < keys
    mask = None
    if queries < keys or hides:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril_(
            keys - queries
        )
    if mask is not None and window is not None:
        mask.triu_(keys - queries - window + 1)
    mixed = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return mixed.permute(2, 0, 1, 3).flatten(2)


class SwiGLU(MegatronModule):
    """silu(gate) * up of (..., gate and up); keeps its input alone for the backward pass (Shazeer
    2020, arXiv 2002.05202)."""

    def forward(self, both: Tensor) -> Tensor:
        """(..., 2 F) -> (..., F)."""
        return _SwiGLU.apply(both)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        gate, up = both.chunk(2, dim=-1)
        answer = torch.empty_like(both)
        of_gate, of_up = answer.chunk(2, dim=-1)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=of_gate)
        torch.mul(F.silu(gate), gradient, out=of_up)
        return answer


class GeGLU(MegatronModule):
    """gelu(gate) * up of (..., gate and up), the GELU by tanh (Shazeer 2020, arXiv 2002.05202)."""

    def forward(self, both: Tensor) -> Tensor:
        """(..., 2 F) -> (..., F)."""
        gate, up = both.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up


class BalancedRouter(TopKRouter):
    """Megatron's, which may add two losses of every token (`rlflow.trainer.megatron.balancing`):
    its scores times `loads` (experts,), and its squared log-sum-exp, each times one of the
    `factors`. sums: of both over the tokens so far, without factors."""

    loads: Tensor | None = None
    factors: tuple[float, float] = (0.0, 0.0)
    sums: Tensor

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Megatron's place for losses of (tokens, experts) logits."""
        if self.loads is None or not (self.training and torch.is_grad_enabled()):
            return logits
        assert padding_mask is not None
        if len(padding_mask) > len(logits):  # Megatron cuts it on the first stage alone
            padding_mask = padding_mask.chunk(self.tp_group.size())[self.tp_group.rank()]
        exact, counted = logits.float(), (~padding_mask).float()
        scores = exact.softmax(-1)
        if self.score_function == "sigmoid":
            scores = exact.sigmoid()
            scores = scores / scores.sum(-1, keepdim=True)
        both = torch.stack([scores @ self.loads, exact.logsumexp(-1).square()]) @ counted
        self.sums += both.detach()
        return MoEAuxLossAutoScaler.apply(logits, (both * both.new_tensor(self.factors)).sum())

    def _apply_expert_bias(self, *_: Any, **__: Any) -> None:
        """Nothing: Megatron would count padding too."""


def rotate(values: Tensor, angles: Tensor, interleaved: bool = False) -> Tensor:
    """Rotary embedding of (T, B, heads, D) by angles (T, 1, 1, D or less), whose two halves are
    equal (Su et al. 2021, arXiv 2104.09864, in the layout of two halves, not `interleaved`
    pairs)."""
    assert not interleaved, "no model family here interleaves"
    half = angles[..., : angles.shape[-1] // 2]
    return _Rotary.apply(values, half.cos().to(values.dtype), half.sin().to(values.dtype))


def rotate_packed(
    values: Tensor,
    bounds: Tensor,
    angles: Tensor,
    cp_size: int = 1,
    cp_rank: int = 0,
    interleaved: bool = False,
) -> Tensor:
    """The same for packed rows (N, heads, D): positions begin at 0 in every segment. Under context
    parallelism each segment lies on the ranks as Megatron cuts it."""
    own = angles.index_select(0, packed_positions(bounds, values.shape[0], cp_size, cp_rank))
    return rotate(values.unsqueeze(1), own, interleaved).squeeze(1)


class _Rotary(torch.autograd.Function):
    """(a, b) -> (a cos - b sin, b cos + a sin); what lies beyond the rotated dimensions passes
    unchanged."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(values, cos, sin, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(gradient, cos, sin, 1), None, None


def _turned(values: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    half = cos.shape[-1]
    answer = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    answer[..., 2 * half :] = values[..., 2 * half :]
    first, second = values[..., :half], values[..., half : 2 * half]
    torch.mul(first, cos, out=answer[..., :half]).addcmul_(second, sin, value=sign)
    torch.mul(second, cos, out=answer[..., half : 2 * half]).addcmul_(first, sin, value=-sign)
    return answer


def _linear_forward(
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
    """Megatron's, with the products of `rlflow.devices.matmul`."""

    _forward_impl = _linear_forward


class RowLinear(RowParallelLinear):
    """Megatron's, with the products of `rlflow.devices.matmul`."""

    _forward_impl = _linear_forward


class WholeLinear(MegatronModule):
    """A linear layer that every tensor-parallel rank holds whole and applies to tokens of its own,
    as Transformer Engine's does: what latent attention compresses tokens with."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **_: Any
    ) -> None:
        super().__init__(config=config)
        self.weight = torch.nn.Parameter(
            torch.empty(output_size, input_size, dtype=config.params_dtype)
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inputs: Tensor) -> tuple[Tensor, None]:
        """(..., in) -> (..., out), and no bias."""
        return F.linear(inputs, self.weight), None


class _Linear(torch.autograd.Function):
    """inputs (..., in) @ weight.T + bias. Under sequence parallelism the inputs are split over
    ranks by their first dimension and gathered twice, as in Megatron: kept for the backward pass is
    this rank's part. For a weight that is frozen nothing is."""

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
        ctx.save_for_backward(inputs if ctx.needs_input_grad[1] else None, weight)
        ctx.group, ctx.sum_gradient, ctx.gather = group, sum_gradient, gather
        whole = _gathered(inputs, group) if gather else inputs
        # Not `view`: an expert may get no token, and -1 of nothing is anything
        return products.linear(whole.flatten(0, -2), weight, bias).unflatten(0, whole.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        for_inputs, for_weight, for_bias, *_ = ctx.needs_input_grad
        flat = gradient.flatten(0, -2)
        of_inputs = of_weight = None
        if for_inputs:
            of_inputs = products.linear(flat, weight.t()).unflatten(0, gradient.shape[:-1])
            if ctx.gather:
                of_inputs = _scattered(of_inputs, ctx.group)
            elif ctx.sum_gradient:
                dist.all_reduce(of_inputs, group=ctx.group)
        if for_weight:
            whole = _gathered(inputs, ctx.group) if ctx.gather else inputs
            main_grad = getattr(weight, "main_grad", None)
            total = torch.zeros_like(weight) if main_grad is None else main_grad
            products.accumulate(total, flat, whole.flatten(0, -2))
            of_weight = total if main_grad is None else None
        return of_inputs, of_weight, flat.sum(dim=0) if for_bias else None, None, None, None


def _gathered(part: Tensor, group: ProcessGroup) -> Tensor:
    whole = part.new_empty(part.shape[0] * group.size(), *part.shape[1:])
    dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return whole


def _scattered(whole: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's part, by the first dimension, of the sum over ranks."""
    part = whole.new_empty(whole.shape[0] // group.size(), *whole.shape[1:])
    dist.reduce_scatter_tensor(part, whole, group=group)
    return part
