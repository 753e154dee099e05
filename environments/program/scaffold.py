"""What `rlflow env new NAME --agent` writes: an agent on OpenAI's client that is trained."""

from __future__ import annotations

import importlib
import itertools
import json
import random
from pathlib import Path

from rlflow_tools.kit.scaffold import TRAIN, Form

from rlflow.errors import install_command, needing

HIGHEST = 9
"""Of the numbers that are looked for, from 1."""
FACTORS = range(2, 6)
SUMMANDS = range(10)
TRAINED = 96
VALIDATED = 48


def rows(split: str) -> str:
    """JSON Lines of equations, each in one split alone."""
    numbers = range(1, HIGHEST + 1)
    equations = list(itertools.product(FACTORS, numbers, SUMMANDS))
    random.Random(0).shuffle(equations)
    ends = {"train": (0, TRAINED), "val": (TRAINED, TRAINED + VALIDATED)}
    made = [
        {"prompt": f"{factor} * x + {summand} = {factor * x + summand}\n", "answer": x}
        for factor, x, summand in equations[slice(*ends[split])]
    ]
    return "".join(json.dumps(row) + "\n" for row in made)


def check_packages() -> None:
    """Raises MissingPackageError where the packages of agents are not installed."""
    with needing("env new --agent", install_command("agents")):
        for name in ("openai", "starlette", "uvicorn"):
            importlib.import_module(name)


FORM = Form(
    "an agent on OpenAI's client in place of the class; its tasks and reward, a tiny policy, a "
    "configuration",
    {
        "{module}.py": "agent.py.txt",
        "{module}_train.jsonl": lambda: rows("train"),
        "{module}_val.jsonl": lambda: rows("val"),
        "test_{module}.py": "test_agent.py.txt",
        "{module}_player.py": "player.py.txt",
        "{module}.yaml": "configuration.yaml.txt",
    },
    (
        "rlflow env check program --config {configuration}",
        "rlflow env play program --config {configuration}",
        "{pytest} {test}",
        *TRAIN,
    ),
    lessons={"episodes": 200},
    templates=Path(__file__).parent / "templates",
    requires=check_packages,
)
