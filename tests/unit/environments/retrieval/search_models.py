"""Tiny random models in the form of real ones, for tests of encoders."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import BertConfig, BertModel, BertTokenizerFast

WORDS = [
    "query",
    "passage",
    ":",
    "represent",
    "this",
    "sentence",
    "for",
    "searching",
    "relevant",
    "passages",
]
WORDS += ["river", "town", "stone", "sky", "harbour", "king"]


def write_bert(folder: Path, *, seed: int = 0) -> Path:
    """A BERT of 32 dimensions and 2 layers with a WordPiece vocabulary of words and letters."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    vocabulary = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *WORDS,
        *letters,
        *(f"##{letter}" for letter in letters),
    ]
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(vocabulary)))
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(dict.fromkeys(vocabulary)),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        initializer_range=0.5,
    )
    BertModel(config).eval().save_pretrained(folder)
    return folder


def write_modules(
    folder: Path, *, pooling: dict, normalize: bool, prompts: dict | None = None
) -> None:
    """The files of a sentence-transformers folder around a model."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 32, **pooling})
    )
    if normalize:
        modules.append(("3_Normalize", "Normalize"))
    rows = [
        {
            "idx": place,
            "name": str(place),
            "path": path,
            "type": f"sentence_transformers.models.{kind}",
        }
        for place, (path, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(rows))
    (folder / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": 40, "do_lower_case": False})
    )
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": prompts or {}})
    )
