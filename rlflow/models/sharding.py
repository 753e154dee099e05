"""Full HuggingFace tensors <-> one tensor-parallel rank's Megatron tensor. Pure functions that move
elements only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlflow.models.architecture import Architecture, padded_vocab
from rlflow.models.rules import Rule, Split


def shard(
    rule: Rule, sources: Sequence[Tensor], model: Architecture, rank: int, ranks: int
) -> Tensor:
    """The Megatron tensor of tensor-parallel rank `rank` of `ranks`, from the full HuggingFace
    tensors in rule order.

    Latent projections are whole on every rank, as in Transformer Engine's layers."""
    if rule.split in (Split.REPLICATED, Split.LATENT):
        return sources[0]
    if rule.split is Split.ROW:
        return sources[0].chunk(ranks, dim=1)[rank].contiguous()
    if rule.split is Split.QKV:
        # (groups, queries per group * head_dim | head_dim | head_dim, ...): a rank owns whole
        # groups, in the order in which SelfAttention.get_query_key_value_tensors (megatron-core,
        # transformer/attention.py) takes them apart.
        parts = [source.unflatten(0, (model.groups, -1)).chunk(ranks)[rank] for source in sources]
        return torch.cat(parts, dim=1).flatten(0, 1)
    if rule.split is Split.VOCAB:
        full = sources[0]
        rows = padded_vocab(full.shape[0], ranks) // ranks
        part = full[rank * rows : (rank + 1) * rows]
        return torch.cat([part, part.new_zeros(rows - part.shape[0], *part.shape[1:])])
    return torch.cat([source.chunk(ranks)[rank] for source in sources])  # COLUMN, GATE_UP


def merge(rule: Rule, shards: Sequence[Tensor], model: Architecture) -> list[Tensor]:
    """The full HuggingFace tensors in rule order, from the Megatron tensors of all tensor-parallel
    ranks: undoes `shard`."""
    if rule.split in (Split.REPLICATED, Split.LATENT):
        return [shards[0]]
    if rule.split is Split.ROW:
        return [torch.cat(list(shards), dim=1)]
    if rule.split is Split.VOCAB:
        return [torch.cat(list(shards))[: model.vocab]]
    if rule.split is Split.QKV:
        grouped = torch.cat(
            [part.unflatten(0, (model.groups // len(shards), -1)) for part in shards]
        )
        queries = model.heads // model.groups * model.head_dim
        parts = grouped.split([queries, model.head_dim, model.head_dim], dim=1)
        return [part.flatten(0, 1).contiguous() for part in parts]
    pieces = [part.chunk(len(rule.sources)) for part in shards]  # COLUMN, GATE_UP
    return [torch.cat(column) for column in zip(*pieces)]
