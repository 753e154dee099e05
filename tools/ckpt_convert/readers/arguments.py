"""Megatron's arguments, as a checkpoint keeps them, in the words of this package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..dtypes import BFLOAT16, FLOAT16, DType

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
EPSILON = ("norm_epsilon", "layernorm_epsilon")
"""The norm's epsilon, in Megatron-LM before and since megatron-core 0.16."""
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
    for name in EPSILON:
        if args.get(name) is not None:
            found["norm_eps"] = args[name]
    if args.get("group_query_attention"):
        found["groups"] = args.get("num_query_groups")
    elif args.get("group_query_attention") is False and args.get("num_attention_heads") is not None:
        found["groups"] = args["num_attention_heads"]
    return found


def contradictions(
    args: Mapping[str, Any], config: Mapping[str, Any], model: Architecture
) -> Iterator[tuple[str, Any, str]]:
    """(argument, its value, what config.json says instead) of what changes the computation and no shape."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    vocab, scaled = args.get("vocab_size"), args.get("use_rope_scaling")
    if isinstance(vocab, int) and vocab > model.vocab:
        yield "vocab_size", vocab, f"vocab_size {model.vocab}, which drops rows"
    if scaled is not None and model.latent is None and bool(scaled) != (kind == "llama3"):
        yield "use_rope_scaling", scaled, f"rope scaling '{kind}'"
    factor = args.get("rope_scaling_factor")
    if scaled and model.rope_factor is not None and factor is not None and factor != model.rope_factor:
        yield "rope_scaling_factor", factor, f"factor {model.rope_factor}"
    stretched = args.get("rotary_seq_len_interpolation_factor")
    if stretched not in (None, 1) and (kind != "linear" or stretched != rope.get("factor")):
        yield "rotary_seq_len_interpolation_factor", stretched, f"rope scaling '{kind}'"
    if model.latent is not None and args.get("rope_type") is not None:
        if (args["rope_type"] == "yarn") != (kind == "yarn"):
            yield "rope_type", args["rope_type"], f"rope scaling '{kind}'"
        elif kind == "yarn" and args.get("rotary_scaling_factor") not in (None, rope.get("factor")):
            yield "rotary_scaling_factor", args["rotary_scaling_factor"], f"factor {rope.get('factor')}"
    part = args.get("rotary_percent")
    if part is not None and model.latent is None and part != model.rotary_share:
        yield "rotary_percent", part, f"partial_rotary_factor {model.rotary_share}"
    yield from _window_contradictions(args, window_of(config))
    if model.experts is not None:
        expected_of = routing(config)
        if expected_of["moe_router_score_function"] == "sigmoid":  # which Megatron does not combine with it
            del expected_of["moe_router_pre_softmax"]
        for name, expected in expected_of.items():
            if args.get(name) is not None and args[name] != expected:
                yield name, args[name], f"{expected} follows"


def flags_to_give(config: Mapping[str, Any], model: Architecture) -> list[str]:
    """What Megatron-LM does not take from a checkpoint, even with `--use-checkpoint-args`, and computes with nevertheless:
    its options for this model."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind, factor = rope.get("rope_type") or rope.get("type") or "default", rope.get("factor")
    flags = [f"--norm-epsilon {model.norm_eps:g}"]
    if model.rope_factor is not None:
        flags.append(f"--use-rope-scaling --rope-scaling-factor {model.rope_factor:g}")
    elif kind == "linear":
        flags.append(f"--rotary-seq-len-interpolation-factor {factor}")
    elif kind == "yarn" and model.latent is not None:
        flags.append(f"--rope-type yarn --rotary-scaling-factor {factor}")
        names = {"mscale": "--mscale", "mscale_all_dim": "--mscale-all-dim"}
        flags += [f"{flag} {rope[name]}" for name, flag in names.items() if rope.get(name) is not None]
    elif kind != "default":
        flags.append(f"(rope scaling '{kind}' with factor {factor}: as your version of Megatron-LM spells it)")
    if (window := window_of(config)) is not None:
        flags.append(f"--window-size '({window - 1}, 0)'")  # tokens before the current one
    scaling = config.get("routed_scaling_factor")
    if model.experts is not None and scaling not in (None, 1):
        flags.append(f"--moe-router-topk-scaling-factor {scaling}")
    return flags


def _window_contradictions(args: Mapping[str, Any], window: int | None) -> Iterator[tuple[str, Any, str]]:
    """Megatron's window counts the tokens before the current one, that of transformers also the token itself."""
    found, length = args.get("window_size"), args.get("seq_length")
    if isinstance(found, list | tuple) and found:
        if window is None or found[0] not in (window, window - 1):
            yield "window_size", found, f"sliding_window {window}"
    elif window is not None and "window_size" in args and isinstance(length, int) and length > window:
        yield "window_size", found, f"sliding_window {window}, less than the {length} tokens it was trained with"


def window_of(config: Mapping[str, Any]) -> int | None:
    """Tokens that attention looks back on; None where it looks at all."""
    window = config.get("sliding_window")
    used = config.get("use_sliding_window", config.get("model_type") in ("mistral", "mixtral"))
    return window if used and isinstance(window, int) else None


def routing(config: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron's arguments of how tokens choose experts, as transformers computes it: softmax over all experts, unless the
    chosen are normalized afterwards, which is a softmax over the chosen; sigmoid with a bias in DeepSeek-V3 and GLM-4.5."""
    family = config.get("model_type")
    sigmoid = family in ("deepseek_v3", "glm4_moe")
    normalized = family == "mixtral" or bool(config.get("norm_topk_prob"))
    return {
        "moe_router_topk": config.get("num_experts_per_tok"),
        "moe_router_score_function": "sigmoid" if sigmoid else "softmax",
        "moe_router_pre_softmax": not sigmoid and not normalized,
        "moe_router_enable_expert_bias": sigmoid,
    }


def described_layout(args: Mapping[str, Any]) -> dict[str, int]:
    """{`tensor_parallel`: ranks, ...} of the arguments that are given."""
    return {ours: args[theirs] for theirs, ours in LAYOUT.items() if isinstance(args.get(theirs), int)}


def arguments_of(
    config: Mapping[str, Any], model: Architecture, layout: CheckpointLayout, dtype: DType
) -> dict[str, Any]:
    """Megatron-LM's arguments for a model and layout, as `--use-checkpoint-args` reads them from a checkpoint."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found = {theirs: getattr(model, ours) for theirs, ours in MODEL.items()}
    ends = {"decoder_first_pipeline_num_layers": layout.first_layers, "decoder_last_pipeline_num_layers": layout.last_layers}
    found |= dict.fromkeys(EPSILON, model.norm_eps) | ends
    found |= {
        "group_query_attention": model.groups != model.heads,
        "num_query_groups": model.groups,
        "max_position_embeddings": model.max_positions,
        "seq_length": model.max_positions,
        "position_embedding_type": "rope",
        "rotary_percent": model.rotary_share,
        "use_rope_scaling": model.rope_factor is not None,
        "rope_scaling_factor": model.rope_factor or 1.0,
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": model.biases,
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
        "bf16": dtype is BFLOAT16,
        "fp16": dtype is FLOAT16,
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
            "moe_grouped_gemm": layout.fused,
            "moe_shared_expert_gate": model.family == "qwen2_moe",
            **routing(config),
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
