"""Megatron's description of a model's layers: Transformer Engine's parts, or those of `layers`."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.transformer_block import LayerNormImpl, TransformerBlockSubmodules

from rlflow.models.architecture import Architecture
from rlflow.trainer.layout import ParallelLayout
from rlflow.trainer.megatron.layers import ColumnLinear, RMSNorm, RowLinear, SwiGLU, TorchAttention


def block_spec(
    config: TransformerConfig, model: Architecture, first: int, count: int
) -> TransformerBlockSubmodules:
    """`count` layers of the model from `first` on, and the norm after its last."""
    kinds = (False,) * model.layers if model.experts is None else model.experts.sparse
    specs = {sparse: _layer_spec(config, sparse) for sparse in set(kinds)}
    return TransformerBlockSubmodules(
        layer_specs=[specs[sparse] for sparse in kinds[first : first + count]],
        layer_norm=LayerNormImpl if _fused(config) else RMSNorm,
    )


def expert_options(model: Architecture, layout: ParallelLayout, fused: bool) -> dict[str, Any]:
    """What Megatron's configuration says of experts; nothing for a dense model.

    A softmax over the chosen is what transformers makes of one over all whose chosen it normalizes.
    No loss for their balance is added: the policy's is all that is asked for."""
    experts = model.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_shared_expert_intermediate_size": experts.shared_ffn or None,
        "moe_shared_expert_gate": model.shared_gate,
        # A list makes checkpoints keep layers apart, which differ
        "moe_layer_freq": 1 if all(experts.sparse) else [int(here) for here in experts.sparse],
        "moe_router_topk": experts.top_k,
        "moe_router_pre_softmax": not experts.normalized,
        "moe_router_load_balancing_type": "none",
        "moe_enable_routing_replay": True,  # does nothing unless told to
        "moe_grouped_gemm": fused,
        "expert_model_parallel_size": layout.expert_parallel,
        "expert_tensor_parallel_size": 1,
    }


def _layer_spec(config: TransformerConfig, sparse: bool) -> ModuleSpec:
    count = config.num_moe_experts if sparse else None
    if _fused(config):
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=count, moe_grouped_gemm=sparse, qk_layernorm=config.qk_layernorm
        )
    spec = get_gpt_layer_local_spec(
        num_experts=count, normalization="RMSNorm", qk_layernorm=config.qk_layernorm
    )
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention.core_attention = TorchAttention
    if config.use_te_activation_func:  # on CPUs
        attention.linear_qkv, attention.linear_proj = ColumnLinear, RowLinear
        for mlp in _mlps(layer.mlp):
            mlp.activation_func = SwiGLU
            mlp.linear_fc1, mlp.linear_fc2 = ColumnLinear, RowLinear
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


def _mlps(spec: Any) -> list[MLPSubmodules]:
    """Of a layer: its MLP, or that of its experts and the one beside them."""
    parts = spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules
    if isinstance(parts, MoESubmodules):
        return [parts.experts.submodules, parts.shared_experts.submodules]
    return [parts]


def _fused(config: TransformerConfig) -> bool:
    return config.transformer_impl == "transformer_engine"
