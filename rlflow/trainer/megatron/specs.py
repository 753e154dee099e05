"""Megatron's description of a model's layers: Transformer Engine's parts, or those of `layers`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_block import LayerNormImpl, TransformerBlockSubmodules
from torch import Tensor

from rlflow.models.architecture import Architecture
from rlflow.trainer.layout import ParallelLayout
from rlflow.trainer.megatron.layers import (
    BalancedRouter,
    ColumnLinear,
    GeGLU,
    RMSNorm,
    RowLinear,
    SwiGLU,
    TorchAttention,
    WholeLinear,
    has_window,
)


def block_spec(
    config: TransformerConfig, model: Architecture, first: int, count: int
) -> TransformerBlockSubmodules:
    """`count` layers of the model from `first` on, and the norm after its last."""
    kinds = (False,) * model.layers if model.experts is None else model.experts.sparse
    specs = {sparse: _layer_spec(config, sparse, model) for sparse in set(kinds)}
    return TransformerBlockSubmodules(
        layer_specs=[specs[sparse] for sparse in kinds[first : first + count]],
        layer_norm=LayerNormImpl if is_fused(config) else RMSNorm,
    )


def expert_options(model: Architecture, layout: ParallelLayout, fused: bool) -> dict[str, Any]:
    """What Megatron's configuration says of experts; nothing for a dense model.

    A softmax over the chosen is what transformers makes of one over all whose chosen it normalizes.
    Losses of their load are `BalancedRouter`'s: Megatron's are of a micro-batch each."""
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
        **_routing_options(model),
    }


def _routing_options(model: Architecture) -> dict[str, Any]:
    """What is said of routers that are not a softmax alone; they compute in float32, as those of
    transformers do."""
    routing = model.routing
    if routing is None:
        return {}
    limited = routing.groups > 1
    return {
        "moe_router_dtype": "fp32",
        "moe_router_score_function": "sigmoid" if routing.sigmoid else "softmax",
        "moe_router_pre_softmax": not routing.sigmoid,
        "moe_router_enable_expert_bias": routing.sigmoid,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": routing.scaling,
        "moe_router_num_groups": routing.groups if limited else None,
        "moe_router_group_topk": routing.chosen if limited else None,
    }


def window_options(model: Architecture) -> dict[str, Any]:
    """What Megatron's configuration says of layers with a window, which there does not count the
    token itself; nothing for a model without."""
    window = model.window
    if window is None or window.layers is None:
        return {}
    return {
        "window_size": (window.tokens - 1, 0),
        "window_attn_skip_freq": [int(windowed) for windowed in window.layers],
    }


def latent_options(model: Architecture) -> dict[str, Any]:
    """What Megatron's configuration says of latent attention; nothing for a model without."""
    latent, yarn = model.latent, model.yarn
    if latent is None:
        return {}
    scaled = {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0}
    if yarn is not None:
        scaled = {
            "rope_type": "yarn",
            "rotary_scaling_factor": yarn.factor,
            "original_max_position_embeddings": yarn.original,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale_all_dim,
        }
    return {
        "multi_latent_attention": True,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.key_rank,
        "qk_head_dim": latent.plain,
        "qk_pos_emb_head_dim": latent.rotating,
        "v_head_dim": latent.value,
        "rotary_base": model.rope_theta,
        "qk_layernorm": True,
        "apply_rope_fusion": False,  # Megatron's needs Triton
        **scaled,
    }


def _layer_spec(config: TransformerConfig, sparse: bool, model: Architecture) -> ModuleSpec:
    count = config.num_moe_experts if sparse else None
    kinds = {
        "num_experts": count,
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": config.multi_latent_attention,
    }
    if is_fused(config):
        spec = get_gpt_layer_with_transformer_engine_spec(moe_grouped_gemm=sparse, **kinds)
    else:
        spec = get_gpt_layer_local_spec(normalization="RMSNorm", **kinds)
    if isinstance(parts := _submodules(spec.submodules.mlp), MoESubmodules):
        parts.router = BalancedRouter
    if is_fused(config):
        return spec
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention.core_attention = TorchAttention
    on_cpu = config.use_te_activation_func
    if on_cpu:
        attention.linear_proj = RowLinear
        for mlp in _mlps(layer.mlp):
            mlp.activation_func = SwiGLU if model.activation == "silu" else GeGLU
            mlp.linear_fc1, mlp.linear_fc2 = ColumnLinear, RowLinear
    if config.multi_latent_attention:
        _make_latent(layer.self_attention, on_cpu)
        return spec
    if model.window is not None and model.window.rope_theta is not None:
        layer.self_attention.module = TwoBaseAttention
    if on_cpu:
        attention.linear_qkv = ColumnLinear
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


class LatentAttention(MLASelfAttention):
    """Latent attention of the modules that its spec names: megatron-core from 0.19 on refuses some
    of them where Transformer Engine is absent."""

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        return vars(submodules)


class TwoBaseAttention(SelfAttention):
    """Attention of a model whose layers with a window rotate by a base of their own. It takes the
    angles of both kinds side by side, as `TwoBases` makes them."""

    def forward(
        self, hidden_states: Tensor, *args: Any, rotary_pos_emb: Tensor, **options: Any
    ) -> Any:
        """(tokens, rows, hidden), and no bias."""
        everywhere, windowed = rotary_pos_emb.chunk(2, dim=-1)
        own = windowed if has_window(self.config, self.layer_number) else everywhere
        return super().forward(hidden_states, *args, rotary_pos_emb=own, **options)


class TwoBases(torch.nn.Module):
    """Rotary angles (tokens, 1, 1, 2 D): of layers that see everything, and of those with a
    window."""

    def __init__(self, everywhere: RotaryEmbedding, windowed: RotaryEmbedding) -> None:
        super().__init__()
        self._both = (everywhere, windowed)

    def get_rotary_seq_len(self, *args: Any) -> int:
        """Megatron's number of positions, which no base changes."""
        return self._both[0].get_rotary_seq_len(*args)

    def forward(self, *args: Any, **options: Any) -> Tensor:
        """Arguments as of each of the two."""
        return torch.cat([angles(*args, **options) for angles in self._both], dim=-1)


def _make_latent(spec: ModuleSpec, on_cpu: bool) -> None:
    """Replaces the parts of latent attention. The first products are whole on every rank, as
    Transformer Engine's are."""
    spec.module, attention = LatentAttention, spec.submodules
    attention.q_layernorm = attention.kv_layernorm = RMSNorm
    attention.linear_q_down_proj = attention.linear_kv_down_proj = WholeLinear
    if on_cpu:
        attention.linear_q_proj = attention.linear_q_up_proj = ColumnLinear
        attention.linear_kv_up_proj = ColumnLinear


def _mlps(spec: Any) -> list[MLPSubmodules]:
    """Of a layer: its MLP, or that of its experts and the one beside them."""
    parts = _submodules(spec)
    if isinstance(parts, MoESubmodules):
        return [_submodules(parts.experts), _submodules(parts.shared_experts)]
    return [parts]


def _submodules(spec: Any) -> Any:
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules


def is_fused(config: TransformerConfig) -> bool:
    """Whether the layers are Transformer Engine's."""
    return config.transformer_impl == "transformer_engine"
