"""What the config.json of a tiny model says beside the sizes that all families have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TinySizes:
    """Of a tiny model. ffn: width of what each token passes through in a layer."""

    hidden: int
    heads: int
    kv_heads: int
    ffn: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


def dense_sizes(sizes: TinySizes) -> dict[str, Any]:
    """Of a model whose layers have one MLP."""
    return {"intermediate_size": sizes.ffn, "num_key_value_heads": sizes.kv_heads}


def expert_sizes(sizes: TinySizes, counted_by: str = "num_experts") -> dict[str, Any]:
    """Of eight experts, each half as wide as a dense MLP, two for each token. counted_by: the entry
    of their number."""
    return {
        "moe_intermediate_size": sizes.ffn // 2,
        counted_by: 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }


def grouped_expert_sizes(sizes: TinySizes) -> dict[str, Any]:
    """Of experts below a dense first layer, in one group, with an expert of every token's."""
    return {
        **expert_sizes(sizes, counted_by="n_routed_experts"),
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }


def latent_sizes(sizes: TinySizes) -> dict[str, Any]:
    """Of latent attention."""
    return {
        "num_key_value_heads": sizes.heads,
        "q_lora_rank": 2 * sizes.head_dim,
        "kv_lora_rank": 2 * sizes.head_dim,
        "qk_nope_head_dim": sizes.head_dim,
        "qk_rope_head_dim": sizes.head_dim // 2,
        "v_head_dim": sizes.head_dim,
    }
