"""Layer parts on plain torch, for where Transformer Engine is not installed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the constructor and the parameter mark that Megatron's layers expect of a norm."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class TorchAttention(MegatronModule):
    """Causal attention by torch's scaled_dot_product_attention, grouped queries included.

    megatron-core's own DotProductAttention takes 4 times the time and 6 times the memory at 2,048 tokens on a CPU."""

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__(config=config)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **__: Any,
    ) -> Tensor:
        """(tokens, rows, heads, head_dim) each, keys and values with fewer heads -> (tokens, rows, heads * head_dim).

        Packed, without the dimension of the rows: each segment attends to itself alone."""
        if packed_seq_params is not None:
            bounds = packed_seq_params.cu_seqlens_q
            lengths = (bounds[1:] - bounds[:-1]).tolist()
            segments = zip(*(part.unsqueeze(1).split(lengths) for part in (query, key, value)), strict=True)
            return torch.cat([self._attend(*segment) for segment in segments]).squeeze(1)
        return self._attend(query, key, value)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
        )
        return mixed.permute(2, 0, 1, 3).flatten(2)
