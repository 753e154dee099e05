"""The export of a run by itself: what its model card says, and the code on it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rlflow_tools.ckpt_convert.verify import verify_export

from rlflow import train
from rlflow.run.export import base_name
from tests.flow.letters import Letters, letters_config, write_letters_model
from tests.reference import ORACLE


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    few = ("run.steps=2", "evaluation.every_steps=0", "metrics.picture=false",
           f"trainer.backend={ORACLE}", "evaluation.final_questions=4", "rollout.max_response_tokens=8",
           "rollout.max_total_tokens=32")  # fmt: skip
    start = write_letters_model(folder / "start")
    (start / "chat_template.jinja").write_text("{% if enable_thinking %}{{ messages }}{% endif %}")
    option = "rollout.chat_template_options.enable_thinking=false"
    train(letters_config(start, folder, *few, option))
    return folder / "letters" / "export"


def test_the_card_says_what_was_trained_on_what_and_how_well_it_does(export: Path) -> None:
    card = (export / "README.md").read_text()
    summary = json.loads((export.parent / "summary.json").read_text())
    assert f"{summary['last_evaluation']['eval/exact_match']:.3f}" in card
    for told in ("Letters", "start", "2 steps", "4 prompts", "grpo", "rlflow eval --model"):
        assert told in card
    verify_export(export)  # the manifest vouches for the card too
    assert "README.md" in json.loads((export / "manifest.json").read_text())["files"]


def test_the_card_says_how_the_chat_template_was_rendered(export: Path) -> None:
    card = (export / "README.md").read_text()
    assert (
        "apply_chat_template(messages, add_generation_prompt=True, enable_thinking=False)" in card
    )
    assert '`chat_template_kwargs`: `{"enable_thinking": false}`' in card


def test_responses_end_where_they_did_in_training(export: Path) -> None:
    generation = json.loads((export / "generation_config.json").read_text())
    assert generation["stop_strings"] == list(Letters.stop)
    assert generation["eos_token_id"] == [1]


def test_the_snippet_on_the_card_stops_at_a_stop_string(
    export: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (export / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    said = capsys.readouterr().out.removesuffix("\n")
    assert said in Letters.stop, "8 tokens are allowed, the first letter ends the response"


def test_a_base_model_of_the_hub_is_called_by_its_name_there() -> None:
    cached = "/home/me/.cache/huggingface/hub/models--Qwen--Qwen2.5-3B/snapshots/0a1b2c"
    assert base_name(cached) == "Qwen/Qwen2.5-3B"
    assert base_name("/data/models/first/") == "first"
