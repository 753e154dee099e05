"""Mixtral: every layer has experts, under names of its own; the weights of a token's experts always
add up to one."""

from functools import partial
from typing import Any

from rlflow.models.entries import experts_of, sliding_window
from rlflow.models.family import ModelFamily
from rlflow.models.layer_rules import ATTENTION, EMBEDDING, FINAL_NORM, OUTPUT, sparse_mlp
from rlflow.models.tiny_sizes import TinySizes

EXPERTS = sparse_mlp("layer.block_sparse_moe.", ("w1", "w3", "w2"))


def tiny(sizes: TinySizes) -> dict[str, Any]:
    return {
        "num_key_value_heads": sizes.kv_heads,
        "intermediate_size": sizes.ffn // 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }


FAMILY = ModelFamily(
    rules=(EMBEDDING, *ATTENTION, *EXPERTS, FINAL_NORM, OUTPUT),
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    window=sliding_window,
    experts=partial(experts_of, normalized=True),
    tiny=tiny,
)
