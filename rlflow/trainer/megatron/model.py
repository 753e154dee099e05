"""A GPTModel from config.json, in any layout."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import _grad_accum_fusion_available
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from rlflow.errors import ConfigError, install_command
from rlflow.models.architecture import Architecture, padded_vocab
from rlflow.models.layer_rules import ROUTER_BIAS
from rlflow.trainer.megatron.cpu import device
from rlflow.trainer.megatron.layers import normalize_output, scale_output
from rlflow.trainer.megatron.logprobs import OutputLayer, at_tokens, predicted_here
from rlflow.trainer.megatron.specs import (
    TwoBases,
    block_spec,
    expert_options,
    latent_options,
    window_options,
)
from rlflow.trainer.megatron.world import World

LAYERS = "RLFLOW_LAYERS"
"""Environment variable: auto, or local for megatron-core's own layers where Transformer Engine is
installed too."""
ACTIVATIONS = {"silu": F.silu, "gelu_pytorch_tanh": F.gelu}
"""As Megatron names them to its fused kernels; that of GELU is the one by tanh."""
FP8_GRANULES = {"none": 1, "delayed": 16, "tensorwise": 16, "blockwise": 16, "mxfp8": 32}
"""Tokens of a product come in multiples of these (megatron-core 0.19: get_fp8_align_size)."""


class PolicyModel(GPTModel):
    """A GPTModel that ends before its output layer, which `token_logprobs` fuses with
    log-softmax."""

    vocab: int
    chunk_bytes: int
    own_parameters: frozenset[str] = frozenset()
    """Those that HuggingFace directories do not hold."""

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """(T, B, hidden), also on the last stage; split by tokens under sequence parallelism."""
        return hidden_states

    def own_tensors(self) -> dict[str, Tensor]:
        """Parameters, and the biases of routers, which are none."""
        kind = ROUTER_BIAS.megatron.rpartition(".")[2]
        biases = ((name, value) for name, value in self.named_buffers() if name.endswith(kind))
        return {**dict(self.named_parameters()), **dict(biases)}

    def head(self) -> OutputLayer:
        """The output layer of the last stage."""
        tied = self.share_embeddings_and_output_weights
        return OutputLayer(
            weight=self.shared_embedding_or_output_weight() if tied else self.output_layer.weight,
            vocab=self.vocab,
            group=self.pg_collection.tp,
            context_group=self.pg_collection.cp,
            sequence_parallel=self.config.sequence_parallel,
            chunk_bytes=self.chunk_bytes,
        )


@dataclass(frozen=True)
class ValueHead:
    """A critic's output layer. `layer`: hidden -> 1, whole on every tensor-parallel rank of
    `group`."""

    layer: torch.nn.Linear
    group: ProcessGroup
    context_group: ProcessGroup
    sequence_parallel: bool


class ValueModel(PolicyModel):
    """A critic: one number per token in place of the logits. Its last layer is whole on every rank
    and starts as 0."""

    own_parameters = frozenset({"output_layer.weight", "output_layer.bias"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "share_embeddings_and_output_weights": False})
        if not self.post_process:
            return
        self.output_layer = torch.nn.Linear(
            self.config.hidden_size, 1, dtype=self.config.params_dtype
        )
        parameter: Any
        for parameter in self.output_layer.parameters():
            torch.nn.init.zeros_(parameter)
            # Marks of Megatron's: each rank's gradient is of its own tokens, and the gradient norm
            # counts one rank alone.
            parameter.sequence_parallel = self.config.sequence_parallel
            parameter.tensor_model_parallel = False

    def head(self) -> ValueHead:  # type: ignore[override]
        """The output layer of the last stage."""
        groups = self.pg_collection
        return ValueHead(self.output_layer, groups.tp, groups.cp, self.config.sequence_parallel)


def token_values(
    hidden: Tensor,
    lengths: Tensor,
    *,
    head: ValueHead,
    places: Tensor,
    wanted: Tensor | None = None,
) -> Tensor:
    """(B, T) float32: position t is the value of what stands before token t. Arguments as of
    `token_logprobs`."""
    weight, bias = head.layer.weight.float(), head.layer.bias.float()
    values = F.linear(hidden.float(), weight, bias).squeeze(-1)
    # Numbers cross ranks, not hidden states; each rank's gradient is that of its own tokens
    if head.sequence_parallel:
        values = gather_from_sequence_parallel_region(
            values, tensor_parallel_output_grad=False, group=head.group
        )
    valid = predicted_here(lengths, places, wanted)
    found = values.flatten().index_select(0, places[:, :-1][valid])
    return at_tokens(found, valid, head.context_group)


def build_model(
    model: Architecture,
    world: World,
    dtype: torch.dtype,
    chunk_bytes: int,
    recompute: Collection[str] = (),
    kind: type[PolicyModel] = PolicyModel,
    fp8: str = "none",
    fused: bool = True,
    vocab: int | None = None,
) -> list[PolicyModel]:
    """This rank's model chunks, one per virtual pipeline stage, their weights not yet set.

    chunk_bytes: of float32 logits at a time. recompute: as `TrainerOptions.recomputed`. fp8: a
    recipe of Transformer Engine's, or none. fused: take its layers where they can be had; adapters
    need the input of each linear layer, which a norm fused with it does not give out. vocab: the
    first so many ids have a probability (`known_vocab`); None: all."""
    config = transformer_config(model, world, dtype, recompute, fp8, fused)
    chunks = [
        _build_chunk(model, world, config, number, chunk_bytes, kind)
        for number in range(world.layout.virtual_pipeline)
    ]
    for chunk in chunks:
        chunk.vocab = model.vocab if vocab is None else vocab
    return chunks


def _build_chunk(
    model: Architecture,
    world: World,
    config: TransformerConfig,
    number: int,
    chunk_bytes: int,
    kind: type[PolicyModel],
) -> PolicyModel:
    layers = model.layers // world.layout.stages
    first = (number * world.pipeline_parallel + world.pipeline_rank) * layers
    module = kind(
        config=config,
        transformer_layer_spec=block_spec(config, model, first, layers),
        vocab_size=padded_vocab(model.vocab, world.tensor_parallel),
        max_sequence_length=model.max_positions,
        pre_process=world.first_stage and number == 0,
        post_process=world.last_stage and number == world.layout.virtual_pipeline - 1,
        parallel_output=True,
        share_embeddings_and_output_weights=model.tied,
        position_embedding_type="rope",
        rotary_base=int(model.rope_theta) if model.rope_theta.is_integer() else model.rope_theta,
        rotary_percent=model.rotary_share,
        rope_scaling=model.rope_factor is not None,
        rope_scaling_factor=model.rope_factor or 1.0,
        seq_len_interpolation_factor=None if model.rope_divisor == 1 else model.rope_divisor,
        vp_stage=number if world.layout.virtual_pipeline > 1 else None,
    )
    add_own_parts(module, model)
    RouterReplay.clear_global_router_replay_instances()  # a list that would keep every model's
    module.chunk_bytes = chunk_bytes
    return module.to(device())


def add_own_parts(module: GPTModel, model: Architecture) -> None:
    """Adds what a family's layers compute and Megatron's have no option for."""
    if model.window is not None and model.window.rope_theta is not None:
        windowed = RotaryEmbedding(
            model.head_dim,
            model.rotary_share,
            rotary_base=model.window.rope_theta,
            use_cpu_initialization=module.config.use_cpu_initialization,
            cp_group=module.pg_collection.cp,
        )
        module.rotary_pos_emb = TwoBases(module.rotary_pos_emb, windowed)
    if model.embedding_scale != 1 and module.pre_process:
        scale_output(module.embedding, model.embedding_scale)
    if model.post_norms:
        for layer in module.decoder.layers:
            for linear in (layer.self_attention.linear_proj, layer.mlp.linear_fc2):
                normalize_output(linear, module.config)


def transformer_config(
    model: Architecture,
    world: World,
    dtype: torch.dtype,
    recompute: Collection[str] = (),
    fp8: str = "none",
    fused: bool = True,
) -> TransformerConfig:
    """Megatron's configuration of the architecture on this layout. recompute, fp8, fused: as of
    `build_model`."""
    on_cpu = not torch.cuda.is_available()
    interleaved = world.layout.virtual_pipeline > 1
    # Parts that are added to layers are added to Megatron's own
    fused = fused and uses_transformer_engine() and not model.post_norms
    configured = partial(
        TransformerConfig if model.latent is None else MLATransformerConfig,
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.groups,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.ffn,
        gated_linear_unit=True,
        activation_func=ACTIVATIONS[model.activation],
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        qk_layernorm=model.qk_norm,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        layernorm_zero_centered_gamma=model.zero_centered_norms,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=world.tensor_parallel,
        pipeline_model_parallel_size=world.pipeline_parallel,
        virtual_pipeline_model_parallel_size=world.layout.virtual_pipeline if interleaved else None,
        context_parallel_size=world.layout.context_parallel,
        sequence_parallel=world.layout.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=on_cpu,
        perform_initialization=False,  # every weight is loaded
        transformer_impl="transformer_engine" if fused else "local",
        calculate_per_token_loss=True,  # no rank averages: `Batch.weights` holds each token's share
        # Micro-batches differ in shape, so stages tell each other theirs; Megatron ties that to
        # this dispatcher.
        variable_seq_lengths=world.pipeline_parallel > 1 and not interleaved,
        moe_token_dispatcher_type="alltoall",
        batch_p2p_sync=not on_cpu,
        # Two stages that take turns send to and receive from the same rank at once. In one batch
        # those messages are told apart by their order alone, and over gloo forward and backward
        # tensors silently change places.
        batch_p2p_comm=not interleaved,
        overlap_p2p_comm=interleaved and not on_cpu,
    )
    kinds = expert_options(model, world.layout, fused) | window_options(model)
    kinds |= latent_options(model) or {"softmax_scale": model.own_scale}
    fusions = _fusions(on_cpu) | kinds  # latent attention has no fused rotation
    # e4m3 forward, e5m2 for gradients
    eight_bits = {} if fp8 == "none" else {"fp8": "hybrid", "fp8_recipe": fp8}
    return configured(**fusions, **eight_bits, **_recompute(recompute))


def _fusions(on_cpu: bool) -> dict[str, bool]:
    """On CPUs these are the operations in `layers`; on GPUs rotary kernels are Transformer Engine's
    or those, SwiGLU and GeGLU are Megatron's own, and gradients of weights need an extension of Apex."""
    return {
        "gradient_accumulation_fusion": not on_cpu and _grad_accum_fusion_available,
        "apply_rope_fusion": True,
        "use_te_activation_func": on_cpu,
        "bias_activation_fusion": not on_cpu,
        "bias_dropout_fusion": False,  # no dropout, no bias: an addition is all there is
        "masked_softmax_fusion": False,  # neither attention calls it
    }


def _recompute(parts: Collection[str]) -> dict[str, Any]:
    if not parts:
        return {}
    if "full" in parts:
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    experts = ["moe"] if "mlp" in parts else []  # Megatron's word for the MLP of a layer with them
    return {"recompute_granularity": "selective", "recompute_modules": [*sorted(parts), *experts]}


def uses_transformer_engine() -> bool:
    """Whether the layers are Transformer Engine's: on GPUs where it is installed, unless
    RLFLOW_LAYERS=local. The only place that decides it; `layers_name` says it. Raises ConfigError
    for another value of the variable."""
    asked = os.environ.get(LAYERS, "auto")
    if asked not in ("auto", "local"):
        raise ConfigError(f"{LAYERS}: expected auto or local, found '{asked}'.")
    return asked == "auto" and bool(HAVE_TE) and torch.cuda.is_available()


def layers_name() -> str:
    """Which layers a model is built of, for people."""
    if uses_transformer_engine():
        version = metadata.version("transformer-engine")
        return f"Transformer Engine {version}: fused norms and linear layers, its attention"
    where = "on a GPU" if torch.cuda.is_available() else "on the CPU"
    without = "" if HAVE_TE else " (Transformer Engine is not installed)"
    return f"megatron-core's local layers {where}, torch's attention{without}"


def check_fp8(recipe: str) -> None:
    """Raises ConfigError where products in fp8 are asked for and the layers cannot do them."""
    if recipe != "none" and not uses_transformer_engine():
        raise ConfigError(
            f"trainer.fp8: '{recipe}' needs the layers of Transformer Engine on a GPU, found "
            f"{layers_name()}; {install_command('gpu')}, or set it to none."
        )


def named_parameters(chunks: Sequence[GPTModel]) -> Iterator[tuple[str, Parameter]]:
    """This rank's parameters. Names repeat between chunks, so where there are several each starts
    with its chunk's number."""
    for prefix, chunk in prefixed(chunks):
        yield from ((prefix + name, parameter) for name, parameter in chunk.named_parameters())


def trained_parameters(
    chunks: Sequence[PolicyModel], biases: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Those of `named_parameters` that are trained: all, or adapters; biases: of routers too."""
    for prefix, chunk in prefixed(chunks):
        for name, value in chunk.own_tensors().items():
            if value.requires_grad or (biases and not isinstance(value, Parameter)):
                yield prefix + name, value


def prefixed(chunks: Sequence[GPTModel]) -> Iterator[tuple[str, GPTModel]]:
    """(what the names of its parameters start with, chunk) for this rank's chunks."""
    yield from (
        (f"{number}." if len(chunks) > 1 else "", chunk) for number, chunk in enumerate(chunks)
    )
