"""Tiny models to start from: a byte-level BPE tokenizer learned from texts, and a random model of
Qwen2's kind that can copy, or of another family."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rlflow.errors import ConfigError, did_you_mean
from rlflow.models.families import FAMILIES
from rlflow.models.huggingface import quiet_transformers
from rlflow.models.layer_rules import QKV_BIAS
from rlflow.models.rules import makes
from rlflow.models.tiny_sizes import TinySizes

ROPE_THETA = 1e6  # as Qwen2.5
END = "<|endoftext|>"
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen2 splits text before pairs are merged; transformers puts it into any tokenizer of that
family anyway."""


def write_tokenizer(
    directory: str | Path,
    texts: Iterable[str],
    *,
    vocabulary: int = 512,
    tags: Sequence[str] = (),
    learned_on: str = QWEN2,
    max_length: int = 2048,
) -> None:
    """Learns a tokenizer from texts and writes tokenizer.json and tokenizer_config.json into
    `directory`. Any text can be encoded, and decoding gives it back.

    vocabulary: tokens at the most, tags included. tags: texts that are one token each. learned_on:
    the pattern by which texts are split while pairs are learned; afterwards Qwen2's own is used."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        trainers,
    )

    def split(pattern: str) -> Any:
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), to_bytes])

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = split(learned_on)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = vocabulary - len(tags)
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = split(QWEN2)
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in tags])
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_random_model(
    directory: str | Path,
    *,
    hidden: int = 128,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    ffn: int = 320,
    seed: int = 0,
    family: str = "qwen2",
) -> None:
    """Adds a randomly initialised model that fits the tokenizer in `directory`; where queries and
    keys have biases it can copy (see `_teach_copying`). ffn: what each token passes through; of
    experts, two of eight, each with half of it. Raises ConfigError for a family that is not one of
    `tiny_families()`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    known = FAMILIES.get(family)
    if known is None or known.tiny is None:
        possible = tiny_families()
        raise ConfigError(
            f"family: expected one of {', '.join(possible)}, found '{family}'."
            f"{did_you_mean(family, possible)}"
        )
    tokenizer = AutoTokenizer.from_pretrained(directory)
    vocabulary = -(-len(tokenizer) // 64) * 64
    common = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    own = known.tiny(TinySizes(hidden, heads, kv_heads, ffn))
    config = AutoConfig.for_model(family, **{**common, **own})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    if makes(known.rules, QKV_BIAS):
        _teach_copying(model, torch.Generator().manual_seed(seed))
    with quiet_transformers():
        model.save_pretrained(directory)


def tiny_families() -> list[str]:
    """Those of which tiny models are made."""
    return [name for name, family in FAMILIES.items() if family.tiny is not None]


def _teach_copying(model: Any, generator: Any) -> None:
    """Sets the initial weights of two attention layers so that a token that was seen before is
    followed by what followed it.

    A tiny network finds this circuit only after tens of minutes of training, and all that it is to
    learn here rests on it. It is the induction head of Olsson et al. 2022 (arXiv 2209.11895): in
    layer 0 one head looks at the token before (biases of query and key that the rotary embedding
    turns into a peak at distance 1) and writes its embedding into directions of its own; in layer 1
    heads look for the present token there, and copy what they find. Later layers start out copying
    what they look at.
    """
    import torch

    config, layers = model.config, model.model.layers
    hidden, heads, kv_heads = (
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
    )
    size, shared = hidden // heads, heads // kv_heads
    # Rotation frequencies: the fast ones tell position, the slow ones hardly turn, so that they can
    # compare tokens far apart.
    fast, slow = size // 8, torch.arange(size // 4, size // 2)
    content = torch.cat([slow, slow + size // 2])
    directions = torch.linalg.qr(torch.randn(hidden, hidden, generator=generator))[0].T
    read, write = directions[: len(content)], directions[len(content) : 2 * len(content)]
    with torch.no_grad():
        # Tied: small ones could not say anything with confidence.
        model.model.embed_tokens.weight.mul_(5)
        for number, layer in enumerate(layers[1:], start=1):
            attention = layer.self_attn
            for group in range(kv_heads):
                rows = torch.linalg.qr(torch.randn(hidden, size, generator=generator))[0].T
                attention.v_proj.weight[group * size : (group + 1) * size] = rows
                for head in range(group * shared, (group + 1) * shared):
                    gain = 0.5 if number == 1 and head % shared == 0 else 0.05
                    attention.o_proj.weight[:, head * size : (head + 1) * size] = gain * rows.T
        first, second = layers[0].self_attn, layers[1].self_attn
        turn = ROPE_THETA ** (-torch.arange(fast) * 2 / size)  # radians per position
        first.q_proj.weight[:size], first.k_proj.weight[:size] = 0, 0
        first.k_proj.bias[:fast] = 5.0
        first.q_proj.bias[:fast] = 5 * turn.cos()
        first.q_proj.bias[size // 2 : size // 2 + fast] = -5 * turn.sin()
        first.v_proj.weight[: len(content)] = read
        first.o_proj.weight[:, :size] = 0
        first.o_proj.weight[:, : len(content)] = 0.25 * write.T
        for group in range(kv_heads):
            query, key = group * shared * size, group * size
            second.q_proj.weight[query : query + size], second.k_proj.weight[key : key + size] = (
                0,
                0,
            )
            second.q_proj.weight[query + content], second.k_proj.weight[key + content] = (
                2 * read,
                2 * write,
            )
