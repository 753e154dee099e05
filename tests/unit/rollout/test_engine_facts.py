"""A run plans by what its engine says about itself, not by the engine's name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlflow.rollout.embedded.facts import EmbeddedFacts
from rlflow.rollout.engine_facts import EngineFacts, engine_facts
from rlflow.rollout.vllm.facts import VLLMFacts

PAGE = Path(__file__).resolve().parents[3] / "docs" / "engines.md"
OWN = """
from rlflow.rollout.embedded.embedded_engine import EmbeddedEngine
from rlflow.rollout.engine_facts import EngineFacts, with_facts

class Slower(EmbeddedEngine):
    "Ours, in another's hands: what is known of it stays known."

class Large(EngineFacts):
    memory_known = True
    start_s = 120.0

    def memory(self, load, free=None):
        return {"engine's weights": 7}

@with_facts(Large)
def make_large(path):
    raise NotImplementedError

def make_vllm_engines(path):
    "Of the same name as one of ours, and another thing."
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "own_engines.py"
    file.write_text(OWN)
    return file


@pytest.mark.parametrize(
    ("name", "expected"),
    [("embedded", EmbeddedFacts), ("vllm", VLLMFacts), ("vllm_server", EngineFacts), ("none", EngineFacts)],
)  # fmt: skip
def test_engines_that_ship_say_what_they_take(name: str, expected: type[EngineFacts]) -> None:
    assert type(engine_facts({"name": name})) is expected


def test_an_own_engine_is_known_by_what_it_says(own: Path) -> None:
    assert type(engine_facts({"name": f"{own}:Slower"})) is EmbeddedFacts
    assert type(engine_facts({"name": f"{own}:make_vllm_engines"})) is EngineFacts
    large = engine_facts({"name": f"{own}:make_large", "engines": 3})
    assert (large.count, large.memory_known, large.start_limit_s()) == (3, True, 120.0)


def test_the_example_of_the_page_is_known_by_what_it_says(tmp_path: Path) -> None:
    example = re.search(r"```python\n(# my_engine.py\n.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert example is not None
    file = tmp_path / "page_engine.py"
    file.write_text(example[1])
    facts = engine_facts({"name": f"{file}:MyEngine", "share": 0.3, "tensor_parallel": 2})
    assert (facts.own_gpus, facts.gpus_each, facts.start_limit_s()) == (True, 2, 300.0)
    assert facts.gpu_memory(1000)[0] == {"my engine": 300}


def test_weights_are_kept_in_the_policys_dtype_unless_another_is_named() -> None:
    for facts in (EmbeddedFacts, VLLMFacts):
        assert facts({}).dtype("bfloat16") == "bfloat16"
        assert facts({"dtype": "bfloat16"}).dtype("float32") == "bfloat16"
