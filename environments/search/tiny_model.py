"""The starting policy's shell: a byte-level BPE tokenizer made for the fictional world, and a tiny random Qwen2 model."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from rlflow_environments.search.demonstrations import Clumsiness, demonstrate
from rlflow_environments.search.names import syllables

TAGS = ("<think>", "</think>", "<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>")
END = "<|endoftext|>"

# A capitalised word is split after its third letter, so that an invented name is its two syllables wherever it stands; numbers in
# pairs of digits; everything else as usual in byte-level BPE.
PIECES = r"Question|Title| ?[A-Z][a-z]{0,2}|'s| ?[a-z]+| ?\d{1,2}| ?[^\sA-Za-z\d]+|\s+(?!\S)|\s+"


def write_tokenizer(directory: str | Path, vocabulary: int = 1536, seed: int = 0) -> None:
    """Trains the tokenizer on demonstrations and writes tokenizer.json and tokenizer_config.json into `directory`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PIECES), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary - len(TAGS), special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_texts(random.Random(seed)), trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END, "model_max_length": 2048,
              "clean_up_tokenization_spaces": False}  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _texts(generator: random.Random) -> Iterator[str]:
    clumsy = Clumsiness(guess=0.1, vague=0.1, give_up=0.1)
    for _ in range(1500):
        demonstration = demonstrate(generator, clumsy)
        yield "".join([demonstration.prompt, *(part for turn in demonstration.turns for part in turn)])
    first, last = syllables()
    for _ in range(20):
        yield "".join(f" {a}{b}" for a, b in zip(first, last, strict=True))
        yield "\n".join(f'"{a}{b}' for a, b in zip(first, last, strict=True))


def write_random_model(directory: str | Path, *, hidden: int = 128, layers: int = 4, heads: int = 4, kv_heads: int = 2,
                       ffn: int = 320, seed: int = 0) -> None:  # fmt: skip
    """Adds a randomly initialised Qwen2 model that fits the tokenizer in `directory`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

    tokenizer = AutoTokenizer.from_pretrained(directory)
    vocabulary = -(-len(tokenizer) // 64) * 64
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        intermediate_size=ffn, max_position_embeddings=2048, tie_word_embeddings=True, rms_norm_eps=1e-6,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None, pad_token_id=tokenizer.pad_token_id, dtype="float32",
    )  # fmt: skip
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
