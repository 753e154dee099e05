"""Complete tiny HuggingFace directories for tests: a byte-level BPE tokenizer with a ChatML template, and random
models."""

from __future__ import annotations

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
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
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

    family: qwen2, qwen3 or llama (with llama3 RoPE scaling). Every parameter is random, biases and norm weights too, so
    that a mapping error shows. scale: standard deviation of the weights; larger ones make peaked distributions.
    sizes: keywords of the family's transformers config, e.g. hidden_size=128, num_hidden_layers=4.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    classes = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }
    config_class, model_class = classes[family]
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
    if family == "qwen3":
        values["head_dim"] = 32  # not hidden_size / num_attention_heads
    if family == "llama":
        values["max_position_embeddings"] = 131072
        values["rope_parameters"] = {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    model = model_class(config_class(**{**values, **sizes}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            centre = 1.0 if "norm" in name else 0.0
            parameter.copy_(centre + scale * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(str(path))
    if tokenizer:
        tiny_tokenizer(path)
    return Path(path)
