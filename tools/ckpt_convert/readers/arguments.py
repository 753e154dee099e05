"""Megatron's arguments, as a checkpoint keeps them, in the words of this package."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rlflow.models.architecture import Architecture, routing_of, window_of
from rlflow.models.entries import Experts, SlidingWindow, rope_kind, rope_of
from rlflow.storage.pickles import DTYPES, origin_of

from ..dtypes import BFLOAT16, FLOAT16, DType

if TYPE_CHECKING:
    from ..mapping.to_megatron import CheckpointLayout

MODEL = {
    "num_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "kv_channels": "head_dim",
    "ffn_hidden_size": "ffn",
    "norm_epsilon": "norm_eps",
    "layernorm_epsilon": "norm_eps",  # its name since megatron-core 0.16
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
SAME: dict[str, Any] = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "quick_geglu": False,
    "rotary_interleaved": False,
    "apply_layernorm_1p": False,
    "layernorm_zero_centered_gamma": False,
    "apply_residual_connection_post_layernorm": False,
    "qk_l2_norm": False,
    "softmax_type": "vanilla",
}
"""Arguments that have one value in nearly all families (`_same`); another changes the computation
and no shape."""
UNSET = dict.fromkeys(
    ("moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk"), 1
)
"""What Megatron computes where these arguments are None."""

UNREAD: dict[str, Any] = {
    "group_query_attention": False,
    "num_query_groups": 1,
    "norm_epsilon": 1e-5,
    "rotary_percent": 1.0,
    "use_rope_scaling": False,
    "moe_router_enable_expert_bias": False,
    "moe_router_pre_softmax": False,
}
"""Megatron-LM's defaults of arguments that RLinf neither sets nor reads."""
LONGEST_LIST = 1024
"""Values that are read of a list, such as one per layer."""


def told(state: Mapping[str, Any]) -> tuple[dict[str, Any], int | None]:
    """(Megatron's arguments, iteration) of what a checkpoint has beside weights."""
    args, iteration = state.get("args"), state.get("iteration")
    return _arguments(args), iteration if isinstance(iteration, int) else None


def _arguments(args: Any) -> dict[str, Any]:
    """The arguments that can be read: of a namespace, a dictionary, or a dictionary of OmegaConf.
    Those that are objects claim nothing."""
    content = _omegaconf_content(args)
    if content is not None:
        lists: dict[int, list[Any]] = {}
        return _without_unread({name: _node_value(node, lists) for name, node in content.items()})
    fields = args if isinstance(args, dict) else getattr(args, "state", None)
    fields = fields if isinstance(fields, dict) else {}
    return {
        name: value for name, value in fields.items() if isinstance(name, str) and _plain(value)
    }


def _plain(value: Any) -> bool:
    """Whether it is a value rather than a stand-in for an object, or the dtype that a name is."""
    origin = origin_of(value)
    return not origin or (isinstance(value, type) and origin.removeprefix("torch.") in DTYPES)


def _omegaconf_content(value: Any) -> Mapping[Any, Any] | None:
    """The nodes by key of a DictConfig; None for anything else."""
    content = value.state.get("_content") if _is_node(value) else None
    return content if isinstance(content, dict) else None


def _node_value(node: Any, lists: dict[int, list[Any]]) -> Any:
    """The value of a node, or those of a ListConfig. lists: by id, as a file can name one list many
    times."""
    content = node.state.get("_content") if _is_node(node) else None
    if not isinstance(content, list):
        return _leaf(node)
    if id(node) not in lists:
        lists[id(node)] = [_leaf(item) for item in content[:LONGEST_LIST]]
    return lists[id(node)]


def _leaf(node: Any) -> Any:
    """The value of a node that holds one; None for containers, and for what is to be computed."""
    value = node.state.get("_val") if _is_node(node) else node
    computed = isinstance(value, str) and (value == "???" or "${" in value)
    return value if _plain(value) and not computed else None


def _is_node(value: Any) -> bool:
    """Whether it stands for an object of OmegaConf, whose attributes are known."""
    named = origin_of(value).startswith("omegaconf.") and not isinstance(value, type)
    return named and isinstance(value.state, dict)


def _without_unread(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Arguments of a program that fills a dictionary with Megatron-LM's defaults and never reads
    some of them, as RLinf does (rlinf/utils/initialize.py): a default claims nothing."""
    named = {name: value for name, value in values.items() if isinstance(name, str)}
    args = {
        name: value
        for name, value in named.items()
        if value is not None and not (name in UNREAD and value == UNREAD[name])
    }
    if isinstance(args.get("num_query_groups"), int):
        args["group_query_attention"] = True  # it builds the model with these groups
    if str(args.get("normalization", "")).lower() == "rmsnorm":
        args["normalization"] = "RMSNorm"
    return args


def described_layout(args: Mapping[str, Any]) -> dict[str, int]:
    """{`tensor_parallel`: ranks, ...} of the arguments that are given."""
    given = {ours: args.get(theirs) for theirs, ours in LAYOUT.items()}
    return {name: size for name, size in given.items() if isinstance(size, int)}


def described_model(args: Mapping[str, Any]) -> dict[str, Any]:
    """{field of Architecture: value} of the arguments that are given."""
    found = {ours: args[theirs] for theirs, ours in MODEL.items() if args.get(theirs) is not None}
    if args.get("group_query_attention"):
        found["groups"] = args.get("num_query_groups")
    elif args.get("group_query_attention") is False and "heads" in found:
        found["groups"] = found["heads"]
    return found


def contradictions(
    args: Mapping[str, Any], config: Mapping[str, Any], model: Architecture
) -> Iterator[tuple[str, Any, str]]:
    """(argument, its value, what config.json says instead) of what changes the computation and no
    shape."""
    rope, given = rope_of(config), _with_unset(args)
    kind, factor = rope_kind(rope), rope.get("factor")
    scaling, by = f"rope scaling '{kind}'", f"factor {factor}"
    # Of each argument: what config.json says, and the values that agree with it.
    fits: dict[str, tuple[str, Container[Any]]] = {}
    fits["vocab_size"] = f"vocab_size {model.vocab}, which drops rows", range(model.vocab + 1)
    stretches = (1, factor) if kind == "linear" else (1,)
    fits["rotary_seq_len_interpolation_factor"] = scaling, stretches
    same = _same(model) | _with_unset(_routing(config, model.experts))
    if same.get("moe_router_score_function") == "sigmoid":
        del same["moe_router_pre_softmax"]  # which Megatron does not combine with it
    for name, expected in same.items():
        fits[name] = f"{expected} follows", (expected,)
    fits["no_rope_freq"] = "every layer rotates", (0, [0] * model.layers)
    normed = model.qk_norm or model.latent is not None
    fits["qk_layernorm"] = "queries and keys have no norms", (False, normed)
    positions = ["rope", kind] if kind == "yarn" else ["rope"]
    if model.latent is not None:
        positions.append("none")  # latent attention rotates nevertheless
    fits["position_embedding_type"] = "rope follows", positions
    if model.latent is None:
        share, scale = model.rotary_share, given.get("softmax_scale")
        fits["rotary_percent"] = f"partial_rotary_factor {share}", (share,)
        fits["use_rope_scaling"] = scaling, (kind == "llama3",)
        if args.get("use_rope_scaling") and model.rope_factor is not None:
            fits["rope_scaling_factor"] = by, (model.rope_factor,)
        if scale is not None and not _near(scale, model.softmax_scale):
            yield "softmax_scale", scale, f"{model.softmax_scale:g} follows"
    elif given.get("rope_type") is not None:
        fits["rope_type"] = scaling, ("yarn" if kind == "yarn" else "rope",)
        if kind == "yarn":
            fits["rotary_scaling_factor"] = by, (factor,)
    for name, (present, agreeing) in fits.items():
        if given.get(name) is not None and given[name] not in agreeing:
            yield name, args[name], present
    yield from _window_contradictions(args, window_of(config))


def _same(model: Architecture) -> dict[str, Any]:
    """SAME of a model's family."""
    centered = model.zero_centered_norms
    norms = {"apply_layernorm_1p": centered, "layernorm_zero_centered_gamma": centered}
    return {**SAME, **norms, "swiglu": model.activation == "silu"}


def _with_unset(args: Mapping[str, Any]) -> dict[str, Any]:
    return {name: UNSET.get(name) if value is None else value for name, value in args.items()}


def _near(found: Any, expected: float) -> bool:
    return isinstance(found, float) and math.isclose(found, expected, rel_tol=1e-6)


def _window_contradictions(
    args: Mapping[str, Any], window: SlidingWindow | None
) -> Iterator[tuple[str, Any, str]]:
    """Megatron's window counts the tokens before the current one, that of transformers also the
    token itself."""
    found, length = args.get("window_size"), args.get("seq_length")
    tokens = None if window is None else window.tokens
    used = tokens is not None and isinstance(length, int) and length > tokens
    if isinstance(found, list | tuple) and found:
        if tokens is None or found[0] not in (tokens, tokens - 1):
            yield "window_size", found, f"sliding_window {tokens}"
    elif used and "window_size" in args:
        less = f"less than the {length} tokens it was trained with"
        yield "window_size", found, f"sliding_window {tokens}, {less}"


def flags_to_give(config: Mapping[str, Any], model: Architecture) -> list[str]:
    """Megatron-LM's options for what it does not take from a checkpoint, even with
    `--use-checkpoint-args`, and computes with nevertheless."""
    rope = rope_of(config)
    kind, factor = rope_kind(rope), rope.get("factor")
    flags = [f"--norm-epsilon {model.norm_eps:g}"]
    if model.rope_factor is not None:
        flags.append(f"--use-rope-scaling --rope-scaling-factor {model.rope_factor:g}")
    elif kind == "linear":
        flags.append(f"--rotary-seq-len-interpolation-factor {factor}")
    elif kind == "yarn" and model.latent is not None:
        flags.append(f"--rope-type yarn --rotary-scaling-factor {factor}")
        given = {name for name, value in rope.items() if value is not None}
        names = {"mscale": "--mscale", "mscale_all_dim": "--mscale-all-dim"}
        flags += [f"{flag} {rope[name]}" for name, flag in names.items() if name in given]
    elif kind != "default":
        how = f"rope scaling '{kind}' with factor {factor}"
        flags.append(f"({how}: as your version of Megatron-LM spells it)")
    window = window_of(config)
    if model.post_norms:
        parts = "norms of what attention and MLP add, GELU, two rotary bases, scaled embeddings"
        flags.append(f"({parts}: Megatron-Bridge has them, Megatron-LM no options for them)")
    if window is not None:
        flags.append(f"--window-size '({window.tokens - 1}, 0)'")  # tokens before the current one
        if window.layers is not None and not all(window.layers):
            freq = ",".join(str(int(windowed)) for windowed in window.layers)
            flags.append(f"--window-attn-skip-freq '[{freq}]'")
    shape = routing_of(config)
    if shape is not None and shape.scaling != 1:
        flags.append(f"--moe-router-topk-scaling-factor {shape.scaling}")
    return flags


def _routing(config: Mapping[str, Any], experts: Experts | None) -> dict[str, Any]:
    """Megatron's arguments of how tokens choose experts, as transformers computes it: softmax over
    all experts, unless the chosen are normalized afterwards, which is a softmax over the chosen."""
    if experts is None:
        return {}
    shape = routing_of(config)
    sigmoid = shape is not None and shape.sigmoid
    limited = shape if shape is not None and shape.groups > 1 else None
    return {
        "moe_router_topk": experts.top_k or None,
        "moe_router_score_function": "sigmoid" if sigmoid else "softmax",
        "moe_router_pre_softmax": not sigmoid and not experts.normalized,
        "moe_router_enable_expert_bias": sigmoid,
        "moe_router_topk_scaling_factor": shape.scaling if shape is not None else None,
        "moe_router_num_groups": limited.groups if limited is not None else None,
        "moe_router_group_topk": limited.chosen if limited is not None else None,
    }


def arguments_of(
    config: Mapping[str, Any], model: Architecture, layout: CheckpointLayout, dtype: DType
) -> dict[str, Any]:
    """Megatron-LM's arguments for a model and layout, as `--use-checkpoint-args` reads them from a
    checkpoint."""
    found = {theirs: getattr(model, ours) for theirs, ours in MODEL.items()}
    found |= _same(model) | _layout_arguments(layout)
    found |= {
        "group_query_attention": model.groups != model.heads,
        "num_query_groups": model.groups,
        "max_position_embeddings": model.max_positions,
        "seq_length": model.max_positions,
        "position_embedding_type": "rope",
        "rotary_percent": model.rotary_share,
        "use_rope_scaling": model.rope_factor is not None,
        "rope_scaling_factor": model.rope_factor or 1.0,
        "add_bias_linear": model.biases,
        "add_qkv_bias": model.qkv_bias,
        "qk_layernorm": model.qk_norm or model.latent is not None,
        "untie_embeddings_and_output_weights": not model.tied,
        "vocab_size": model.vocab,
        "padded_vocab_size": layout.rows(model.vocab),
        "params_dtype": dtype,
        "bf16": dtype is BFLOAT16,
        "fp16": dtype is FLOAT16,
        "iteration": 0,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
    }
    if model.query_scalar is not None:
        found["softmax_scale"] = model.softmax_scale
    if model.experts is not None:
        found |= _expert_arguments(config, model, layout)
    if model.latent is not None:
        found |= _latent_arguments(rope_of(config), model)
    return found


def _layout_arguments(layout: CheckpointLayout) -> dict[str, Any]:
    return {
        "make_vocab_size_divisible_by": layout.vocab_multiple,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual if layout.virtual > 1 else None,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.tensor,
        "decoder_first_pipeline_num_layers": layout.first_layers,
        "decoder_last_pipeline_num_layers": layout.last_layers,
        "transformer_impl": "transformer_engine" if layout.fused else "local",
    }


def _expert_arguments(
    config: Mapping[str, Any], model: Architecture, layout: CheckpointLayout
) -> dict[str, Any]:
    experts = model.experts
    assert experts is not None, "asked of a dense model"
    return {
        "num_experts": experts.count,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_shared_expert_intermediate_size": experts.shared_ffn or None,
        "moe_layer_freq": 1 if all(experts.sparse) else [int(layer) for layer in experts.sparse],
        "moe_grouped_gemm": layout.fused,
        "moe_shared_expert_gate": model.shared_gate,
        **_routing(config, experts),
    }


def _latent_arguments(rope: Mapping[str, Any], model: Architecture) -> dict[str, Any]:
    latent = model.latent
    assert latent is not None, "asked of a model with ordinary attention"
    yarn = rope_kind(rope) == "yarn"
    names = "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"
    return {
        "multi_latent_attention": True,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.key_rank,
        "qk_head_dim": latent.plain,
        "qk_pos_emb_head_dim": latent.rotating,
        "v_head_dim": latent.value,
        "rope_type": "yarn" if yarn else "rope",
        "rotary_scaling_factor": rope.get("factor", 1.0) if yarn else 1.0,
        "mscale_all_dim": 0.0,
        **{name: rope[name] for name in names if yarn and rope.get(name) is not None},
    }
