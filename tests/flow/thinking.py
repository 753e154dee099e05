"""A conversation of three turns in which the policy thinks before it speaks, and a model whose template forgets the thoughts.

Named in configurations as `<this file>:Conversation`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlflow.config.schema import RunConfig
from rlflow.environment import Environment
from rlflow.report.metrics import Metric
from rlflow.types import Episode, Message, Step, Task
from tests.fixtures import tiny_model
from tests.flow.letters import LEARNING, letters_config

LETTERS = "abcd"
TURNS = 3
WORDS = ("<pad>", "<end>", "<user>", "<assistant>", "<think>", "</think>", *LETTERS)
REFERENCE = f"{Path(__file__).resolve()}:Conversation"
THINKING = (  # as Qwen3's thinking models: the prompt opens the thought, the history has none
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}{{- '<assistant>' + message.content.split('</think>')[-1] + '<end>' }}"
    "{%- else %}{{- '<user>' + message.content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<assistant><think>' }}{%- endif %}"
)


class Conversation(Environment):
    """Says a letter per turn and expects it back, behind a thought for the whole point."""

    stop = tuple(LETTERS)
    metrics = {
        "exact_match": Metric("share", "of conversations without a mistake", score=True),
        "thoughts": Metric("per episode", "responses with a thought"),
    }

    def tasks(self, split: str) -> Sequence[Task]:
        asked = itertools.product(LETTERS, repeat=TURNS)
        return [Task(f"{split}-{''.join(one)}", [_user(one[0])], one) for one in asked]

    async def step(self, episode: Episode, response: str) -> Step:
        asked, turn = episode.task.answer, episode.turns
        _, _, said = response.rpartition("</think>")
        right, thinks = said == asked[turn - 1], "</think>" in response
        all_right = episode.scratch["right"] = (
            episode.scratch.get("right", True) and right and thinks
        )
        thoughts = episode.scratch["thoughts"] = episode.scratch.get("thoughts", 0) + thinks
        metrics = {"exact_match": float(all_right and turn == TURNS), "thoughts": float(thoughts)}
        reward = (right + right * thinks) / (2 * TURNS)
        if turn == TURNS:
            return Step(reward=reward, terminated=True, metrics=metrics)
        return Step([_user(asked[turn])], reward, metrics=metrics)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def write_thinking_model(path: Path, family: str = "qwen3", **others: Any) -> Path:
    """A random Qwen3, or one of another family, whose tokens are WORDS; returns its directory."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(WORDS)}, []))
    tokenizer.decoder = decoders.Fuse()
    sizes = {"vocab_size": len(WORDS), "hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
    tiny_model(path, family, tokenizer=False, eos_token_id=1, pad_token_id=0, **{**sizes, **others})
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=["<user>", "<assistant>"],
    )
    fast.add_tokens(["<think>", "</think>"])
    fast.chat_template = THINKING
    fast.save_pretrained(str(path))
    return path


def thinking_config(model: Path, runs: Path, *overrides: str) -> RunConfig:
    """A run of the conversation; its directory is `runs/letters`."""
    values = (
        f"environment={{name: '{REFERENCE}'}}", f"rollout.max_turns={TURNS}", "rollout.max_response_tokens=4",
        "rollout.max_total_tokens=32", "metrics.picture=false", "checkpoint.export=false",
    )  # fmt: skip
    return letters_config(model, runs, *values, *LEARNING, *overrides)
