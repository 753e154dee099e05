"""Megatron's arguments, as a checkpoint keeps them, in the words of this package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rlflow.models.architecture import Architecture

    from ..mapping.to_megatron import CheckpointLayout

MODEL = {
    "num_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "kv_channels": "head_dim",
    "ffn_hidden_size": "ffn",
    "norm_epsilon": "norm_eps",
    "rotary_base": "rope_theta",
}
"""Arguments by field of `models.architecture.Architecture`."""
LAYOUT = {
    "tensor_model_parallel_size": "tensor_parallel",
    "pipeline_model_parallel_size": "pipeline_parallel",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline_parallel",
    "expert_model_parallel_size": "expert_parallel",
    "context_parallel_size": "context_parallel",
    "data_parallel_size": "data_parallel",
}


def described_model(args: Mapping[str, Any]) -> dict[str, Any]:
    """{field of Architecture: value} of the arguments that are given."""
    found = {ours: args[theirs] for theirs, ours in MODEL.items() if args.get(theirs) is not None}
    if args.get("group_query_attention"):
        found["groups"] = args.get("num_query_groups")
    return found


def described_layout(args: Mapping[str, Any]) -> dict[str, int]:
    """{`tensor_parallel`: ranks, ...} of the arguments that are given."""
    return {ours: args[theirs] for theirs, ours in LAYOUT.items() if isinstance(args.get(theirs), int)}


def arguments_of(
    config: Mapping[str, Any], model: Architecture, layout: CheckpointLayout, dtype: torch.dtype
) -> dict[str, Any]:
    """Megatron-LM's arguments for a model and layout, as `--use-checkpoint-args` reads them from a checkpoint."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found = {theirs: getattr(model, ours) for theirs, ours in MODEL.items()}
    found |= {
        "group_query_attention": model.groups != model.heads,
        "num_query_groups": model.groups,
        "max_position_embeddings": model.max_positions,
        "seq_length": model.max_positions,
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
        "use_rope_scaling": model.rope_factor is not None,
        "rope_scaling_factor": model.rope_factor or 1.0,
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": model.qkv_bias,
        "qk_layernorm": model.qk_norm or model.latent is not None,
        "untie_embeddings_and_output_weights": not model.tied,
        "vocab_size": model.vocab,
        "padded_vocab_size": layout.rows(model.vocab),
        "make_vocab_size_divisible_by": layout.vocab_multiple,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual if layout.virtual > 1 else None,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.tensor,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "transformer_impl": "transformer_engine" if layout.fused else "local",
        "iteration": 0,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
    }
    if model.experts is not None:
        sparse = model.experts.sparse
        found |= {
            "num_experts": model.experts.count,
            "moe_ffn_hidden_size": model.experts.ffn,
            "moe_shared_expert_intermediate_size": model.experts.shared_ffn or None,
            "moe_layer_freq": 1 if all(sparse) else [int(layer) for layer in sparse],
            "moe_router_topk": config.get("num_experts_per_tok"),
            "moe_grouped_gemm": layout.fused,
        }
    if model.latent is not None:
        found |= {
            "multi_latent_attention": True,
            "q_lora_rank": model.latent.query_rank,
            "kv_lora_rank": model.latent.key_rank,
            "qk_head_dim": model.latent.plain,
            "qk_pos_emb_head_dim": model.latent.rotating,
            "v_head_dim": model.latent.value,
            "rope_type": "yarn" if rope.get("rope_type", rope.get("type")) == "yarn" else "rope",
        }
    return found
