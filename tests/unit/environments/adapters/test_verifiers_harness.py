"""A taskset of verifiers 0.4 with tools, played by verifiers' own harness through the endpoint."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from fixtures import tiny_tokenizer

from rlflow.errors import ConfigError
from rlflow.types import StopReason
from rlflow_environments.adapters.verifiers import make
from rlflow_environments.adapters.verifiers.harness import VerifiersHarness
from rlflow_environments.adapters.verifiers.tasksets import VerifiersTaskset
from tests.unit.environments.endpoint.scripted import checked, play
from tests.unit.rollout.chat_templates import QWEN3, dressed

PACKAGES = Path(__file__).parent / "packages"
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _packages(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers.v1", reason="needs: pip install 'verifiers>=0.4'")
    pytest.importorskip("uv", reason="uv is not installed: pip install uv")
    monkeypatch.syspath_prepend(PACKAGES)
    monkeypatch.setenv("PYTHONPATH", str(PACKAGES))  # of the tools' servers


def call(name: str, **arguments: int) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def says(text: str, number: int) -> str:
    """Asks for the numbers, has them added, and answers."""
    found = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", text)
    if not found:
        return call("hidden_numbers_of_the_task")
    if len(found) == 1:
        first, second = map(int, found[0].split())
        return call("adder_add", first=first, second=second)
    return found[1]


def test_the_harness_of_a_taskset_calls_its_tools_and_its_rewards_score(tmp_path: Path) -> None:
    environment = make("adding_taskset")
    assert len(environment.tasks("train")) == 18 and len(environment.tasks("val")) == 2
    tokenizer = dressed(tiny_tokenizer(tmp_path), QWEN3)
    (one,), fed = play(environment, tokenizer, says, max_response_tokens=200)
    checked(one, fed)
    assert one.reward == 2.0 and one.metrics["rubric"] == 2.0 and one.metrics["tool_calls"] == 2
    assert len(one.segments) == 1 and len(one.turns) == 3 and one.metrics["broken_histories"] == 0
    assert '"name": "adder_add"' in tokenizer.decode(fed.contexts[0])
    assert tokenizer.decode(fed.said[-1][:-1]) == "3"  # 1 and 2


def test_a_limit_of_the_rollout_truncates_and_what_is_wrong_is_said(tmp_path: Path) -> None:
    tokenizer = dressed(tiny_tokenizer(tmp_path), QWEN3)
    (one,), _ = play(make("adding_taskset"), tokenizer, says, max_response_tokens=200, max_turns=1)
    assert one.usable and one.stop is StopReason.MAX_TURNS and one.reward == 0.0
    with pytest.raises(ConfigError, match=r"environment\.harness: 'no_such' cannot be made"):
        make("adding_taskset", harness="no_such")


def test_a_harness_plays_what_needs_one_and_what_nobody_can_play_is_refused_with_one_or_without() -> (
    None
):
    assert isinstance(make("sums_taskset"), VerifiersTaskset)
    assert isinstance(
        make("sums_taskset", {"boxed": True}), VerifiersHarness
    )  # scores in a runtime
    assert isinstance(make("sums_taskset", harness="null"), VerifiersHarness)
    for options, told in (
        ({"image": "debian"}, "needs a container"),
        ({"silent": True}, "has no prompt"),
    ):
        for harness in (None, "null"):
            with pytest.raises(ConfigError, match=f"'sums_taskset': a task {told}"):
                make("sums_taskset", options, harness)
