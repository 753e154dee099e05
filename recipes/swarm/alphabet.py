"""The example's task, and its two models: `python recipes/swarm/alphabet.py DIRECTORY` writes them.

Shown a letter, say the next one of the alphabet. Each of two peers has one half of the letters to
train on, and both are evaluated on all: what a peer can do beyond its half, it has from the other.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rlflow import Environment, Episode, Step, Task
from rlflow.report.metrics import Metric

LETTERS = "abcdefghijkl"


class Alphabet(Environment):
    """The letters that come after those of one half (`first`, `second`), or of both."""

    metrics = {"exact_match": Metric("share", "of letters", score=True, shown="EM {:.2f}")}

    def __init__(self, half: str) -> None:
        middle = len(LETTERS) // 2
        self._own = LETTERS[:middle] if half == "first" else LETTERS[middle:]

    def tasks(self, split: str) -> Sequence[Task]:
        following = dict(zip(LETTERS, LETTERS[1:] + LETTERS[0], strict=True))
        return [
            Task(f"after-{one}", f"{one}?", following[one])
            for one in (self._own if split == "train" else LETTERS)
        ]

    async def step(self, episode: Episode, response: str) -> Step:
        right = float(response == episode.task.answer)
        return Step(reward=right, terminated=True, metrics={"exact_match": right})


def write_model(path: Path, family: str, words: Sequence[str], width: int, seed: int) -> None:
    """A random model of one token per word, numbered as they stand."""
    import torch
    from tokenizers import Tokenizer, decoders, models
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>"
    ).save_pretrained(str(path))
    torch.manual_seed(seed)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
             "initializer_range": 0.08}  # fmt: skip
    ends = {
        "bos_token_id": None,
        "pad_token_id": words.index("<pad>"),
        "eos_token_id": words.index("<end>"),
    }
    config = AutoConfig.for_model(family, vocab_size=len(words), **sizes, **ends)
    AutoModelForCausalLM.from_config(config).save_pretrained(str(path))


if __name__ == "__main__":
    vocabulary = ["<pad>", "<end>", *LETTERS, "?"]
    write_model(Path(sys.argv[1]) / "first", "qwen2", vocabulary, width=32, seed=1)
    write_model(Path(sys.argv[1]) / "second", "llama", vocabulary[::-1], width=48, seed=2)
