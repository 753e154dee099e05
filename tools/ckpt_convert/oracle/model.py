"""megatron-core's own model of every family that can be converted, plain and slow: what a conversion is compared with.

Nothing here looks at the mapping tables (rlflow/models/tables.py): the model is built from config.json, its parameters
are named by megatron-core and loaded by megatron-core, so that an error in a table shows as other logits."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from rlflow.errors import ModelError

from ..readers.arguments import window_of


@dataclass(frozen=True)
class OracleLayout:
    """Ranks per tensor, pipeline and expert group; virtual: model chunks per pipeline rank; vocab: rows of the embedding,
    padding included; expert_tensor: over how many tensor-parallel ranks an expert is cut, 0 for all of them; first_layers,
    last_layers: of the first and last pipeline rank where not as many as of the others."""

    vocab: int
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    expert: int = 1
    expert_tensor: int = 0
    first_layers: int | None = None
    last_layers: int | None = None


class Attention(MegatronModule):
    """Causal attention, in some layers within a window, written out. Values may be narrower than keys (latent attention)."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, *_: Any, softmax_scale: float | None = None, **__: Any
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size if windowed else None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """(tokens, rows, heads, size) each, keys and values with fewer heads -> (tokens, rows, heads * size of a value)."""
        copies = query.shape[2] // key.shape[2]
        key, value = (part.repeat_interleave(copies, dim=2) for part in (key, value))
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * (self.scale or query.shape[-1] ** -0.5)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        if self.window is not None:
            later = later | torch.ones_like(later).tril(-self.window[0] - 1)
        weights = scores.float().masked_fill(later, float("-inf")).softmax(-1).to(value.dtype)
        return torch.einsum("bhqk,kbhd->qbhd", weights, value).flatten(2)


def initialize_ranks(layout: OracleLayout) -> None:
    """Lays Megatron's groups over the ranks of torch.distributed, which must be initialized. `destroy_ranks` undoes it."""
    parallel_state.initialize_model_parallel(
        layout.tensor,
        layout.pipeline,
        layout.virtual if layout.virtual > 1 else None,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor or None,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(0)


def rank_coordinates() -> tuple[int, int, int]:
    """This rank's (tensor, pipeline, expert) rank."""
    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    )


def destroy_ranks() -> None:
    """Takes Megatron's groups down."""
    parallel_state.destroy_model_parallel()


def build(config: dict[str, Any], layout: OracleLayout, dtype: torch.dtype = torch.float32) -> list[GPTModel]:
    """This rank's chunks of the model that a config.json describes, with Megatron's local layers and random weights.

    Raises ModelError for what megatron-core does not compute."""
    megatron = _megatron_config(config, layout, dtype)
    rope = _rope(config)
    if _is_yarn(rope, megatron):
        vars(megatron).update(_yarn(config, rope))
    stages = range(layout.virtual) if layout.virtual > 1 else [None]
    chunks = []
    for stage in stages:
        spec = get_gpt_decoder_block_spec(
            megatron, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage
        )
        chunks.append(
            GPTModel(
                config=megatron,
                transformer_layer_spec=_with_attention(spec),
                vocab_size=layout.vocab,
                max_sequence_length=config["max_position_embeddings"],
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                parallel_output=False,
                share_embeddings_and_output_weights=bool(config.get("tie_word_embeddings")),
                position_embedding_type="yarn" if _is_yarn(rope, megatron) else "rope",
                rotary_base=rope.get("rope_theta") or config.get("rope_theta") or 10000.0,
                rotary_percent=rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0,
                rope_scaling=_kind(rope) == "llama3",
                rope_scaling_factor=rope.get("factor") or 1.0,
                vp_stage=stage,
            ).to(dtype)
        )
    return chunks


@torch.no_grad()
def logits(chunks: list[GPTModel], tokens: Tensor, vocab: int) -> Tensor:
    """(rows, tokens, vocab) in float32 on every rank of the pipeline, without the padding. A collective."""
    group = parallel_state.get_pipeline_model_parallel_group()
    ranks, place = dist.get_process_group_ranks(group), parallel_state.get_pipeline_model_parallel_rank()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    config = chunks[0].config
    result = torch.empty(*tokens.shape, chunks[0].vocab_size)
    for turn in range(len(chunks) * len(ranks)):
        chunk, turn_of = divmod(turn, len(ranks))
        if turn_of != place:
            continue
        if turn > 0 and len(ranks) > 1:
            hidden = torch.empty(tokens.shape[1], tokens.shape[0], config.hidden_size, dtype=config.params_dtype)
            dist.recv(hidden, ranks[(place - 1) % len(ranks)])
            chunks[chunk].set_input_tensor(hidden)
        output = chunks[chunk].eval()(tokens, positions, None)
        if turn < len(chunks) * len(ranks) - 1:
            dist.send(output.contiguous(), ranks[(place + 1) % len(ranks)])
        else:
            result = output.float().contiguous()
    dist.broadcast(result, ranks[-1], group=group)
    return result[..., :vocab]


def _with_attention(spec: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = Attention
    return spec


def _megatron_config(config: dict[str, Any], layout: OracleLayout, dtype: torch.dtype) -> TransformerConfig:
    family = config["model_type"]
    values: dict[str, Any] = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_attention_heads": config["num_attention_heads"],
        "num_query_groups": config.get("num_key_value_heads") or config["num_attention_heads"],
        "kv_channels": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "ffn_hidden_size": config["intermediate_size"],
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": bool(config.get("mlp_bias")),
        "add_qkv_bias": family in ("qwen2", "qwen2_moe") or bool(config.get("attention_bias")),
        "qk_layernorm": family in ("qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3") or bool(config.get("use_qk_norm")),
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.get("rms_norm_eps", 1e-6),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual if layout.virtual > 1 else None,
        "num_layers_in_first_pipeline_stage": layout.first_layers,
        "num_layers_in_last_pipeline_stage": layout.last_layers,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor or None,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "use_cpu_initialization": True,
        "transformer_impl": "local",
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "batch_p2p_comm": False,
    }
    experts = next(
        (config[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(key)), 0
    )
    if experts:
        values |= _experts(config, experts)
    if "kv_lora_rank" not in config:
        return TransformerConfig(**values, **_window(config))
    del values["num_query_groups"]
    return MLATransformerConfig(**values, **_latent(config))


def _experts(config: dict[str, Any], count: int) -> dict[str, Any]:
    """Routing as transformers computes it: softmax over all experts, unless the chosen are normalized afterwards, which is
    a softmax over the chosen; sigmoid with a bias in DeepSeek-V3 and GLM-4.5."""
    family, layers = config["model_type"], config["num_hidden_layers"]
    ffn = config.get("moe_intermediate_size") or config["intermediate_size"]
    shared = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * ffn
    sigmoid = family in ("deepseek_v3", "glm4_moe")
    normalized = family == "mixtral" or bool(config.get("norm_topk_prob"))
    groups = config.get("n_group") or 1
    if family == "deepseek_v2" and config.get("topk_method", "greedy") != "greedy" and groups > 1:
        raise ModelError("config.json: topk_method 'group_limited_greedy' is not what megatron-core computes.")
    if sigmoid and not normalized:
        raise ModelError("config.json: norm_topk_prob=false is not what megatron-core computes with sigmoid scores.")
    every, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    first = config.get("first_k_dense_replace") or 0
    pattern = [int(layer >= first and layer not in dense and (layer + 1) % every == 0) for layer in range(layers)]
    return {
        "num_moe_experts": count,
        "moe_ffn_hidden_size": ffn,
        "moe_layer_freq": pattern if 0 in pattern else 1,
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_router_score_function": "sigmoid" if sigmoid else "softmax",
        "moe_router_pre_softmax": not sigmoid and not normalized,
        "moe_router_enable_expert_bias": sigmoid,
        "moe_router_topk_scaling_factor": config.get("routed_scaling_factor") if not normalized or sigmoid else None,
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": config.get("topk_group") if groups > 1 else None,
        "moe_router_load_balancing_type": "none",
        "moe_shared_expert_intermediate_size": shared or None,
        "moe_shared_expert_gate": family == "qwen2_moe",
        "moe_token_dispatcher_type": "allgather",
    }


def _latent(config: dict[str, Any]) -> dict[str, Any]:
    rope = _rope(config)
    values: dict[str, Any] = {
        "q_lora_rank": config.get("q_lora_rank"),
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_head_dim": config["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
        "v_head_dim": config["v_head_dim"],
        "rope_type": "yarn" if _kind(rope) == "yarn" else "rope",
        "rotary_base": rope.get("rope_theta") or config.get("rope_theta") or 10000.0,
        "rotary_scaling_factor": 1.0,
        "mscale_all_dim": 0.0,
    }
    if values["rope_type"] == "yarn":
        values["rotary_scaling_factor"] = rope["factor"]
        names = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        values |= {name: rope[name] for name in names if rope.get(name) is not None}
    known = {field.name for field in dataclasses.fields(MLATransformerConfig)}
    return {name: value for name, value in values.items() if name in known}


def _is_yarn(rope: dict[str, Any], megatron: TransformerConfig) -> bool:
    """YaRN of ordinary attention; latent attention has its own."""
    return _kind(rope) == "yarn" and not isinstance(megatron, MLATransformerConfig)


def _yarn(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Attributes of the configuration that megatron-core reads (models/gpt/gpt_model.py), with the defaults of transformers
    (modeling_rope_utils.py, _compute_yarn_parameters)."""
    return {
        "yarn_rotary_scaling_factor": float(rope["factor"]),
        "yarn_original_max_position_embeddings": rope.get("original_max_position_embeddings")
        or config["max_position_embeddings"],
        "yarn_beta_fast": float(rope.get("beta_fast") or 32),
        "yarn_beta_slow": float(rope.get("beta_slow") or 1),
        "yarn_mscale": rope.get("mscale"),
        "yarn_mscale_all_dim": rope.get("mscale_all_dim"),
        "yarn_correction_range_round_to_int": rope.get("truncate", True),
    }


def _window(config: dict[str, Any]) -> dict[str, Any]:
    """Which layers look back on a window, which in Megatron does not count the token itself."""
    window = window_of(config)
    if window is None:
        return {}
    layers = config["num_hidden_layers"]
    first = config.get("max_window_layers", 0) if config["model_type"].startswith("qwen") else 0
    kinds = config.get("layer_types") or ["sliding_attention" if layer >= first else "" for layer in range(layers)]
    return {
        "window_size": (window - 1, 0),
        "window_attn_skip_freq": [int(kind == "sliding_attention") for kind in kinds],
    }


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _kind(rope: dict[str, Any]) -> str:
    return rope.get("rope_type") or rope.get("type") or "default"
