"""Layer parts on plain torch, for where Transformer Engine is not installed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rlflow.trainer.megatron.context import gather_tokens, held_pieces


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the constructor and the parameter mark that Megatron's layers expect of a norm."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class TorchAttention(MegatronModule):
    """Causal attention by torch's scaled_dot_product_attention, grouped queries included.

    megatron-core's own DotProductAttention takes 4 times the time and 6 times the memory at 2,048 tokens on a CPU, and
    knows neither packed rows nor context parallelism. Under that, each rank gathers the keys and values of all: over gloo one
    collective costs less than a ring. (With Transformer Engine its own attention runs instead: not run yet.)"""

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection, **_: Any) -> None:
        super().__init__(config=config)
        self._context_group = pg_collection.cp

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
        ranks = self._context_group.size()
        if packed_seq_params is None:
            if ranks == 1:
                return _attend(query, key, value)
            return self._attend_over_ranks(query, key, value, [query.shape[0] * ranks])
        bounds = packed_seq_params.cu_seqlens_q
        lengths = (bounds[1:] - bounds[:-1]).tolist()
        query, key, value = (part.unsqueeze(1) for part in (query, key, value))
        if ranks > 1:
            return self._attend_over_ranks(query, key, value, lengths).squeeze(1)
        segments = zip(*(part.split(lengths) for part in (query, key, value)), strict=True)
        return torch.cat([_attend(*segment) for segment in segments]).squeeze(1)

    def _attend_over_ranks(self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
        """This rank's queries against the keys and values of all context-parallel ranks. lengths: of whole segments."""
        group = self._context_group
        both = gather_tokens(torch.cat([key, value], dim=2), lengths, group)
        key, value = both.chunk(2, dim=2)
        pieces = [
            _attend(query[piece.here], key[piece.start : piece.stop], value[piece.start : piece.stop])
            for piece in held_pieces(lengths, group.size(), group.rank())
        ]
        return torch.cat(pieces)


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of the last of the keys' tokens: the last query sees every key."""
    queries, keys = query.shape[0], key.shape[0]
    query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
    mask = None
    if queries < keys:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril_(keys - queries)
    mixed = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=query.shape[1] != key.shape[1]
    )
    return mixed.permute(2, 0, 1, 3).flatten(2)
