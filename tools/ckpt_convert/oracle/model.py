"""megatron-core's own model of every family that can be converted, plain and slow: what a
conversion is compared with.

The model is built from the arguments that the converter writes; its parameters are named and loaded
by megatron-core, so that an error in a mapping table or an argument shows as other logits."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from rlflow.models.architecture import Architecture, routing_of, stored_architecture, window_of
from rlflow.models.entries import refused, rope_kind, rope_of
from rlflow.trainer.megatron.layers import RMSNorm
from rlflow.trainer.megatron.model import add_own_parts
from rlflow.trainer.megatron.specs import LatentAttention, TwoBaseAttention

from ..dtypes import NAMED
from ..mapping.layout import CheckpointLayout
from ..readers.arguments import arguments_of

NAMES = {
    "num_experts": "num_moe_experts",
    "swiglu": "gated_linear_unit",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
}
"""Fields of megatron-core's configuration by Megatron-LM's arguments, where the names differ."""
WITHOUT_GPU = {
    "use_cpu_initialization": True,
    "transformer_impl": "local",
    "moe_grouped_gemm": False,
    "moe_router_load_balancing_type": "none",
}


ACTIVATIONS = {"silu": F.silu, "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh")}


class Attention(MegatronModule):
    """Causal attention, in some layers within a window, written out. Values may be narrower than
    keys (latent attention)."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *_: Any,
        softmax_scale: float | None = None,
        **__: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale
        windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self.window = config.window_size if windowed else None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """(tokens, rows, heads, size) each, keys and values with fewer heads -> (tokens, rows,
        heads * size of a value)."""
        copies = query.shape[2] // key.shape[2]
        key, value = (part.repeat_interleave(copies, dim=2) for part in (key, value))
        scale = self.scale or query.shape[-1] ** -0.5
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * scale
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        if self.window is not None:
            later = later | torch.ones_like(later).tril(-self.window[0] - 1)
        weights = scores.float().masked_fill(later, float("-inf")).softmax(-1).to(value.dtype)
        return torch.einsum("bhqk,kbhd->qbhd", weights, value).flatten(2)


def initialize_ranks(layout: CheckpointLayout, expert_tensor: int = 0) -> None:
    """Lays Megatron's groups over the ranks of torch.distributed, which must be initialized.

    expert_tensor: over how many tensor-parallel ranks an expert is cut, 0 for all of them."""
    parallel_state.initialize_model_parallel(
        layout.tensor,
        layout.pipeline,
        layout.virtual if layout.virtual > 1 else None,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=expert_tensor or None,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(0)


def build(
    config: dict[str, Any],
    layout: CheckpointLayout,
    rows: int,
    dtype: torch.dtype = torch.float32,
    expert_tensor: int = 0,
) -> list[GPTModel]:
    """This rank's chunks of the model that a config.json describes, with Megatron's local layers
    and random weights. rows: of the embedding, padding included.

    Raises ModelError for what megatron-core does not compute."""
    megatron = _megatron_config(config, layout, dtype, expert_tensor)
    model = dataclasses.replace(stored_architecture(config), window=window_of(config))
    rope = rope_of(config)
    yarn = rope_kind(rope) == "yarn" and model.latent is None  # latent attention has its own
    if yarn:
        vars(megatron).update(_yarn(config, rope))

    def built(stage: int | None) -> GPTModel:
        spec = get_gpt_decoder_block_spec(
            megatron, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage
        )
        if model.zero_centered_norms:
            _center_norms(spec)
        for layer in spec.layer_specs:
            attention = layer.submodules.self_attention
            attention.submodules.core_attention = Attention
            if model.latent is not None:
                attention.module = LatentAttention
            elif model.window is not None and model.window.rope_theta is not None:
                attention.module = TwoBaseAttention
        ends = {"ignore_virtual": False, "vp_stage": stage}
        chunk = GPTModel(
            config=megatron,
            transformer_layer_spec=spec,
            vocab_size=rows,
            max_sequence_length=model.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(**ends),
            post_process=parallel_state.is_pipeline_last_stage(**ends),
            parallel_output=False,
            share_embeddings_and_output_weights=model.tied,
            position_embedding_type="yarn" if yarn else "rope",
            rotary_base=model.rope_theta,
            rotary_percent=model.rotary_share,
            rope_scaling=model.rope_factor is not None,
            rope_scaling_factor=rope.get("factor") or 1.0,
            seq_len_interpolation_factor=None if model.rope_divisor == 1 else model.rope_divisor,
            vp_stage=stage,
        )
        add_own_parts(chunk, model)
        return chunk.to(dtype)

    return [built(stage) for stage in (range(layout.virtual) if layout.virtual > 1 else [None])]


def _center_norms(spec: TransformerBlockSubmodules) -> None:
    """Norms that multiply by 1 + weight; Megatron's own for local layers do not."""
    spec.layer_norm = RMSNorm
    for layer in spec.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        if parts.self_attention.submodules.q_layernorm is not IdentityOp:
            parts.self_attention.submodules.q_layernorm = RMSNorm
            parts.self_attention.submodules.k_layernorm = RMSNorm


@torch.no_grad()
def logits(chunks: list[GPTModel], tokens: Tensor, vocab: int) -> Tensor:
    """(rows, tokens, vocab) in float32 on every rank of the pipeline, without the padding. A
    collective."""
    group = parallel_state.get_pipeline_model_parallel_group()
    ranks = dist.get_process_group_ranks(group)
    place = parallel_state.get_pipeline_model_parallel_rank()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    config = chunks[0].config
    result = torch.empty(*tokens.shape, chunks[0].vocab_size)
    for turn in range(len(chunks) * len(ranks)):
        chunk, turn_of = divmod(turn, len(ranks))
        if turn_of != place:
            continue
        if turn > 0 and len(ranks) > 1:
            shape = (*tokens.T.shape, config.hidden_size)
            hidden = torch.empty(shape, dtype=config.params_dtype)
            dist.recv(hidden, ranks[(place - 1) % len(ranks)])
            chunks[chunk].set_input_tensor(hidden)
        output = chunks[chunk].eval()(tokens, positions, None)
        if turn < len(chunks) * len(ranks) - 1:
            dist.send(output.contiguous(), ranks[(place + 1) % len(ranks)])
        else:
            result = output.float().contiguous()
    dist.broadcast(result, ranks[-1], group=group)
    return result[..., :vocab]


def _megatron_config(
    config: dict[str, Any], layout: CheckpointLayout, dtype: torch.dtype, expert_tensor: int
) -> TransformerConfig:
    """From the arguments that the converter writes, by the names that megatron-core has for them
    (Megatron-LM, megatron/training/arguments.py, core_transformer_config_from_args)."""
    model = stored_architecture(config)
    _check_computed(config, model)
    arguments = arguments_of(config, model, layout, NAMED[str(dtype).removeprefix("torch.")])
    kind = MLATransformerConfig if model.latent is not None else TransformerConfig
    values = {
        **{NAMES.get(name, name): value for name, value in arguments.items()},
        **WITHOUT_GPU,
        **_window(config),
        "gated_linear_unit": True,
        "activation_func": ACTIVATIONS[model.activation],
        "expert_tensor_parallel_size": expert_tensor or None,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
    }
    if model.latent is not None:
        del values["num_query_groups"]
    known = {field.name for field in dataclasses.fields(kind)} - {"max_position_embeddings"}
    return kind(**{name: value for name, value in values.items() if name in known})


def _check_computed(config: dict[str, Any], model: Architecture) -> None:
    routing = routing_of(config)
    if routing is None or model.experts is None:
        return
    if not routing.sigmoid and routing.groups > 1:
        raise refused("topk_method 'group_limited_greedy' is not what megatron-core computes.")
    if routing.sigmoid and not model.experts.normalized:
        raise refused(
            "norm_topk_prob=false is not what megatron-core computes with sigmoid scores."
        )


def _yarn(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Attributes of the configuration that megatron-core reads (models/gpt/gpt_model.py), with the
    defaults of transformers (modeling_rope_utils.py, _compute_yarn_parameters)."""
    original = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
    return {
        "yarn_rotary_scaling_factor": float(rope["factor"]),
        "yarn_original_max_position_embeddings": original,
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
    kinds = config.get("layer_types")
    windowed = [layer >= window.first_layer for layer in range(layers)]
    if window.layers is not None:
        windowed = list(window.layers)
    elif kinds:
        windowed = [kind == "sliding_attention" for kind in kinds]
    return {
        "window_size": (window.tokens - 1, 0),
        "window_attn_skip_freq": list(map(int, windowed)),
    }
