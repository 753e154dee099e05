"""What `rlflow env new NAME --dataset` writes: prompts and a reward function that are learned."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path

from rlflow_tools.kit.scaffold import TRAIN, Form

LETTERS = "abcdefgh"
VALIDATED = 16
"""Pairs of letters out of 64 that no prompt of training has."""
_PROMPT = "Two words, one with {}, one with {}:"


def rows(split: str) -> str:
    """JSON Lines of the prompts of a split, which the other one does not have."""
    pairs = list(itertools.product(LETTERS, repeat=2))
    random.Random(0).shuffle(pairs)
    own: Sequence[tuple[str, str]] = pairs[VALIDATED:] if split == "train" else pairs[:VALIDATED]
    made = [{"prompt": _PROMPT.format(*pair), "letters": [*pair]} for pair in own]
    return "".join(json.dumps(row) + "\n" for row in made)


FORM = Form(
    "prompts in JSON Lines and a reward function in place of the class; a tiny policy, a "
    "configuration",
    {
        "{module}_train.jsonl": lambda: rows("train"),
        "{module}_val.jsonl": lambda: rows("val"),
        "{module}_reward.py": "reward.py.txt",
        "test_{module}.py": "test_reward.py.txt",
        "{module}_player.py": "player.py.txt",
        "{module}.yaml": "configuration.yaml.txt",
    },
    (
        "rlflow env check dataset --config {configuration}",
        "rlflow env play dataset --config {configuration}",
        "{pytest} {test}",
        *TRAIN,
    ),
    lessons={"turns": 1},
    templates=Path(__file__).parent / "templates",
)
