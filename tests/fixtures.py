"""Complete tiny HuggingFace directories for tests: a byte-level BPE tokenizer with a ChatML template, and random
models."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXT = (
    "Question: Where was Orvan Telmik born?\n<think>I should search for it.</think>\n<search>Orvan Telmik birthplace</search>\n\n"
    "<information>Doc 1(Title: Orvan Telmik) Orvan Telmik was born in Vasmere, a town on the river Ilda."
    "</information>\n\n<answer>Vasmere</answer> yes no the of and in a is was which who when river city company work "
    "painter wrote founded"
)


_SPARSE = {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    **_SPARSE,
}
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 32},  # not hidden_size / num_attention_heads
    "llama": {
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 96, **_SPARSE},
    "qwen3_moe": {"num_experts": 4, "head_dim": 32, **_SPARSE},
    "glm4_moe": {
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "head_dim": 32,
        "attention_bias": True,
        "use_qk_norm": True,
        "routed_scaling_factor": 1.5,
        **_SPARSE,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "deepseek_v2": {"n_shared_experts": 2, "q_lora_rank": None, **_LATENT, "norm_topk_prob": False},
    "deepseek_v3": {
        "n_shared_experts": 1,
        "q_lora_rank": 24,
        "n_group": 2,
        "topk_group": 1,
        **_LATENT,
    },
}
"""What tiny models of a family have beside or instead of the common sizes; of other families, what their file says."""


def _own_sizes(family: str) -> dict[str, Any]:
    from rlflow.models.families import FAMILIES
    from rlflow.models.tiny_sizes import TinySizes

    if family in _OF_FAMILY:
        return _OF_FAMILY[family]
    tiny = FAMILIES[family].tiny
    return {} if tiny is None else tiny(TinySizes(hidden=64, heads=4, kv_heads=2, ffn=128))


def tiny_tokenizer(path: str | Path, vocab_size: int = 384) -> Path:
    """Writes a byte-level BPE tokenizer (every string encodes, decode(encode(text)) == text) into `path` and returns
    it.

    <|im_end|> is the end-of-sequence token, <|endoftext|> the padding token. About `vocab_size` ids.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator([TEXT] * 2, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(str(path))
    return Path(path)


def tiny_model(
    path: str | Path,
    family: str = "qwen2",
    *,
    tied: bool = False,
    seed: int = 0,
    tokenizer: bool = True,
    scale: float = 0.1,
    **sizes: Any,
) -> Path:
    """Writes a random HuggingFace directory (config, safetensors in fp32, tokenizer) into `path` and returns it.

    family: a file of rlflow/models/families; llama with llama3 RoPE scaling. Every parameter is random, biases
    and norm weights too, so that a mapping error shows. scale: standard deviation of the weights; larger ones make peaked
    distributions. sizes: keywords of the family's transformers config, e.g. hidden_size=128, num_hidden_layers=4.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values: dict[str, Any] = {
        "vocab_size": 384,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "pad_token_id": 0,
        "eos_token_id": 2,
    }
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **{**values, **_own_sizes(family), **sizes})
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            centre = 1.0 if "norm" in name else 0.0
            parameter.copy_(centre + scale * torch.randn(parameter.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(scale * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(str(path))
    if tokenizer:
        tiny_tokenizer(path)
    return Path(path)


def tiny_config(family: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a family's `tiny_model`, with changes."""
    return {**json.loads(_config_of(family)), **changes}


@functools.cache
def _config_of(family: str) -> str:
    with tempfile.TemporaryDirectory() as place:
        return (tiny_model(place, family, tokenizer=False) / "config.json").read_text()
