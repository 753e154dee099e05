"""What Transformer Engine fuses on GPUs, on plain torch: fewer passes over memory and fewer tensors kept for the backward
pass. The layers use these where there is no CUDA."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class SwiGLU(MegatronModule):
    """silu(gate) * up of (..., gate and up); keeps its input alone for the backward pass (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)

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


def rotate(values: Tensor, angles: Tensor, interleaved: bool = False) -> Tensor:
    """Rotary embedding of (T, B, heads, D) by angles (T, 1, 1, D or less), whose two halves are equal (Su et al. 2021, arXiv
    2104.09864, in the layout of two halves, not `interleaved` pairs)."""
    assert not interleaved, "no model family here interleaves"
    half = angles[..., : angles.shape[-1] // 2]
    return _Rotary.apply(values, half.cos().to(values.dtype), half.sin().to(values.dtype))


def rotate_packed(values: Tensor, bounds: Tensor, angles: Tensor, cp_size: int = 1, cp_rank: int = 0) -> Tensor:
    """The same for packed rows (N, heads, D): positions begin at 0 in every segment. Under context parallelism each segment
    lies on the ranks as Megatron cuts it."""
    lengths = (bounds[1:] - bounds[:-1]).div(cp_size, rounding_mode="floor").tolist()
    own = [
        rope_utils._get_thd_freqs_on_this_cp_rank(cp_rank, cp_size, segment, angles)
        for segment in values.split(lengths)
    ]
    return rotate(values.unsqueeze(1), torch.cat(own)).squeeze(1)


class _Rotary(torch.autograd.Function):
    """(a, b) -> (a cos - b sin, b cos + a sin); what lies beyond the rotated dimensions passes unchanged."""

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
