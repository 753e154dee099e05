"""`rlflow sft`, whole: the loss of transformers, a model that says what it was shown, resumed bit for bit, then trained from reward."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.commands import cli
from rlflow.models.huggingface import WeightFiles
from rlflow.report.sinks import read_metrics
from rlflow.run.directory import RunDirectory
from rlflow.storage.files import read_json
from tests.fixtures import tiny_model

CAPITALS = {"Orvan": "Vasmere", "Telmik": "Ilda", "Brena": "Ostrow", "Koru": "Malve", "Sith": "Dorn"}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML whose assistant's turns transformers can tell."""
QUIET = ("metrics.progress=none", "metrics.picture=false", "--overwrite")
STEPS = 8


def rows() -> list[dict[str, Any]]:
    """Two questions and answers each, of other lengths."""
    asked = [*CAPITALS]
    return [
        {
            "messages": [
                {"role": "user", "content": f"Where is {name}?"},
                {"role": "assistant", "content": CAPITALS[name]},
                {"role": "user", "content": f"And {other}, tell me at length" + " please" * place},
                {"role": "assistant", "content": f"It is in {CAPITALS[other]}, I think."},
            ]
        }
        for place, name in enumerate(asked)
        for other in asked
        if name != other
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and rows for training and evaluation."""
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("sft")
    model = tiny_model(folder / "model")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    for name, part in (("train", rows()[:-4]), ("val", rows()[-4:])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(text)
    return folder


def sft(folder: Path, runs: Path, name: str, *options: str) -> RunDirectory:
    given = [
        f"--model={folder / 'model'}", f"--data={folder / 'train.jsonl'}", f"--eval-data={folder / 'val.jsonl'}",
        f"run.directory={runs}/{{name}}", f"run.name={name}", *options,
    ]  # fmt: skip
    assert cli.main(["sft", *given]) == 0
    return RunDirectory.open(runs / name)


def reference_loss(model: Path, conversations: Sequence[dict[str, Any]]) -> float:
    """transformers' mean negative log-likelihood of the tokens that it masks as the assistant's, float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    inner = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    total, count = 0.0, 0
    for row in conversations:
        encoded = tokenizer.apply_chat_template(
            row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        tokens = torch.tensor([list(encoded["input_ids"])])
        mask = torch.tensor([list(encoded["assistant_masks"])]).bool()
        labels = torch.where(mask, tokens, -100)
        with torch.no_grad():
            loss = inner(tokens, labels=labels).loss
        total += float(loss) * int(mask[:, 1:].sum())
        count += int(mask[:, 1:].sum())
    return total / count


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """An uninterrupted run of STEPS steps, all rows in each, packed."""
    runs = tmp_path_factory.mktemp("whole")
    return sft(folder, runs, "whole", *LEARNING, f"run.steps={STEPS}", *QUIET)


LEARNING = (
    "rollout.prompts_per_step=16", "trainer.lr=1e-2", "trainer.tokens_per_microbatch=300",
    "evaluation.every_steps=3", "checkpoint.every_steps=2", "checkpoint.keep=10",
)  # fmt: skip


def test_the_loss_is_that_of_transformers_packed_and_padded(
    folder: Path, whole: RunDirectory, tmp_path: Path
) -> None:
    """All 16 training rows in the first step, the four others in the evaluation before it."""
    padded = sft(folder, tmp_path, "padded", *LEARNING, "run.steps=1", "trainer.packing=false", *QUIET)  # fmt: skip
    expected = [reference_loss(folder / "model", part) for part in (rows()[:-4], rows()[-4:])]
    for run in (whole, padded):
        records = read_metrics(run.metrics)
        trained = next(one for one in records if one["step"] == 1 and "train/nll" in one)
        evaluated = next(one for one in records if "eval/nll" in one)
        assert evaluated["step"] == 0
        assert trained["train/nll"] == pytest.approx(expected[0], abs=1e-5)
        assert trained["train/loss"] == pytest.approx(expected[0], abs=1e-5)
        assert evaluated["eval/nll"] == pytest.approx(expected[1], abs=1e-5)
    after = reference_loss(padded.export, rows()[-4:])
    summary = read_json(padded.summary)
    assert summary["last_evaluation"]["eval/nll"] == pytest.approx(after, abs=1e-5)


def test_its_metrics_are_of_rows_and_speak_of_no_reward(whole: RunDirectory) -> None:
    records = read_metrics(whole.metrics)
    trained = [one for one in records if "train/nll" in one]
    assert [one["step"] for one in trained] == list(range(1, STEPS + 1))
    for one in trained:
        assert not {"train/reward", "train/advantage_zero", "train/logprob_gap"} & one.keys()
        assert one["rollout/turns"] == 2 and one["rollout/episodes"] == 16
    assert not any("reward" in name for one in records for name in one)
    assert trained[-1]["data/epoch"] == STEPS
    assert trained[-1]["train/lr"] < 0.1 * trained[0]["train/lr"]  # the cosine ends with the run
    summary = read_json(whole.summary)
    assert summary["last_evaluation"]["eval/nll"] < summary["first_evaluation"]["eval/nll"]


def timeless(run: RunDirectory) -> list[dict[str, float]]:
    """The metrics of steps, without times and memory."""
    left_out = ("time", "speed", "memory", "eval/")
    return [
        {name: value for name, value in one.items() if not name.startswith(left_out)}
        for one in read_metrics(run.metrics)
        if "train/nll" in one
    ]


def assert_equal(run: RunDirectory, whole: RunDirectory) -> None:
    ours, theirs = WeightFiles(run.export), WeightFiles(whole.export)
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert timeless(run) == timeless(whole)


def test_a_resumed_run_equals_the_whole_one_bit_for_bit(
    whole: RunDirectory, tmp_path: Path
) -> None:
    """From the checkpoint of its fourth step, with what its own config.yaml says."""
    copy = tmp_path / "whole"
    shutil.copytree(whole.path, copy)
    shutil.rmtree(copy / "export")
    given = [f"--config={copy / 'config.yaml'}", "--resume", "run.resume_step=4", "run.overwrite=false"]  # fmt: skip
    assert cli.main(["sft", *given, f"run.directory={tmp_path}/{{name}}", *QUIET[:2]]) == 0
    assert_equal(RunDirectory.open(copy), whole)


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_for_bit(
    folder: Path, whole: RunDirectory, tmp_path: Path
) -> None:
    words = [
        "sft", f"--model={folder / 'model'}", f"--data={folder / 'train.jsonl'}", f"--eval-data={folder / 'val.jsonl'}",
        f"run.directory={tmp_path}/{{name}}", "run.name=whole", *LEARNING, f"run.steps={STEPS}", *QUIET[:2],
    ]  # fmt: skip
    run = RunDirectory(tmp_path / "whole")
    command = [sys.executable, "-m", "rlflow", *words]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        while not run.saved.path(2).is_dir():
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert cli.main([*words, "--resume"]) == 0
    assert_equal(RunDirectory.open(run.path), whole)


REWARD = """
def said(prompt, completion, answer, **row):
    return float(completion.strip() == answer)
"""


def test_what_it_learned_to_say_is_where_reinforcement_learning_begins(
    folder: Path, tmp_path: Path
) -> None:
    """A pair of commands: the answers are learned from rows, then played for reward, in tokens of the same template."""
    pairs = [{"prompt": f"Where is {name}?", "completion": place} for name, place in CAPITALS.items()]  # fmt: skip
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    learned = [
        "sft", f"--model={folder / 'model'}", f"--data={data}", f"--eval-data={data}", "rollout.chat_template=true",
        f"run.directory={tmp_path}/{{name}}", "run.name=first", "--epochs=40", "rollout.prompts_per_step=5",
        "trainer.lr=1e-2", "evaluation.every_steps=0", "checkpoint.every_steps=0", *QUIET,
    ]  # fmt: skip
    assert cli.main(learned) == 0
    first = RunDirectory.open(tmp_path / "first")
    summary = read_json(first.summary)
    assert summary["steps"] == 40 and summary["last_evaluation"]["eval/nll"] < 0.1
    prompts = tmp_path / "prompts.jsonl"
    asked = [{"prompt": one["prompt"], "answer": one["completion"]} for one in pairs]
    prompts.write_text("".join(json.dumps(one) + "\n" for one in asked))
    (tmp_path / "reward.py").write_text(REWARD)
    played = [
        "train", f"--model={first.export}", "--env=dataset", f"environment.train={prompts}", f"environment.val={prompts}",
        f"environment.reward={tmp_path / 'reward.py'}:said", "rollout.chat_template=true", "run.steps=1",
        f"run.directory={tmp_path}/{{name}}", "run.name=second", "rollout.prompts_per_step=2", "rollout.samples_per_prompt=2",
        "rollout.max_response_tokens=16", "checkpoint.every_steps=0", *QUIET,
    ]  # fmt: skip
    assert cli.main(played) == 0
    assert read_json(tmp_path / "second" / "summary.json")["first_evaluation"]["eval/score"] >= 0.8


def test_a_dry_run_shows_a_row_and_counts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["sft", f"--model={folder / 'model'}", f"--data={folder / 'train.jsonl'}", "--dry-run"]
    assert cli.main(given) == 0
    shown = capsys.readouterr().out
    assert "<|im_start|>assistant\n⟦Vasmere<|im_end|>⟧\n<|im_start|>user" in shown
    assert "14 rows of" in shown and "2 rows of" in shown and "1 x 16 prompts" in shown


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["algorithm.losses=[ppo_clip]"], r"algorithm\.losses: .*\[sft\]"),
        (["run.target=0.5"], r"run\.target"),
        (["cluster.rollout_workers=2"], r"cluster\.rollout_workers"),
        (["rollout.max_total_tokens=8"], "no row is left"),
    ],
)
def test_what_makes_no_sense_for_rows_is_said_before_the_start(
    options: list[str], match: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["sft", f"--model={folder / 'model'}", f"--data={folder / 'train.jsonl'}", "--dry-run"]
    assert cli.main([*given, *options]) == 2
    import re

    assert re.search(match, capsys.readouterr().err)


REAL_MODEL = os.environ.get("RLFLOW_REAL_MODEL", "")


@pytest.mark.slow
@pytest.mark.skipif(not REAL_MODEL, reason="RLFLOW_REAL_MODEL names no model directory")
def test_the_loss_of_a_real_model_is_that_of_transformers(folder: Path, tmp_path: Path) -> None:
    """With a template that tells transformers the assistant's turns, where the model's own is ChatML."""
    from transformers import AutoTokenizer

    model = tmp_path / "model"
    shutil.copytree(REAL_MODEL, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    given = [f"--model={model}", f"--data={folder / 'val.jsonl'}", f"--eval-data={folder / 'train.jsonl'}"]  # fmt: skip
    few = ["run.steps=1", "rollout.prompts_per_step=4", "checkpoint.export=false", "evaluation.at_start=false"]  # fmt: skip
    options = [f"run.directory={tmp_path}/{{name}}", "run.name=real", *few, *QUIET]
    assert cli.main(["sft", *given, *options]) == 0
    trained = next(one for one in read_metrics(tmp_path / "real" / "metrics.jsonl") if "train/nll" in one)  # fmt: skip
    assert trained["train/nll"] == pytest.approx(reference_loss(model, rows()[-4:]), abs=1e-5)
