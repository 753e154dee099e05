"""Training adapters, whole runs: what is written, resumed, converted and merged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlflow.commands.cli import main
from rlflow.errors import ModelError
from rlflow.loop import train
from rlflow.models.huggingface import digest, iterate_weights
from rlflow.report.sinks import read_metrics
from rlflow.run.directory import RunDirectory
from rlflow.run.origin import model_directory
from tests.flow.letters import letters_config

SHORT = ("rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "evaluation.questions=4", "evaluation.final_questions=4",
         "metrics.picture=false", "run.deterministic=true", "checkpoint.every_steps=1",
         "algorithm.losses=[{name: ppo_clip}, {name: kl, coefficient: 0.1}]", "trainer.lora={rank: 4, alpha: 8}",
         "trainer.lr=1e-2")  # fmt: skip


def steps(runs: Path) -> list[dict[str, float]]:
    records = read_metrics(RunDirectory.open(runs / "letters").metrics)
    return [
        {key: value for key, value in one.items() if key.startswith("train/")}
        for one in records
        if "train/lr" in one
    ]


BRIEF = ("run.steps=3", "checkpoint.every_steps=0", "checkpoint.export=false", "evaluation.at_start=false",
         "evaluation.every_steps=0", "model.dtype=bfloat16")  # fmt: skip


def recorded(runs: Path, name: str) -> list[float]:
    """A metric of all steps that have it."""
    records = read_metrics(RunDirectory.open(runs / "letters").metrics)
    return [one[name] for one in records if name in one]


@pytest.mark.parametrize("engine", ["float32", "bfloat16"])
def test_merged_adapters_reach_a_float32_engine_and_a_bfloat16_run_says_that_they_do_not(
    model: Path, tmp_path: Path, engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    asked = ("trainer.lora.sync=merged", "trainer.lr=1e-5", f"rollout.engine.dtype={engine}")
    train(letters_config(model, tmp_path, *SHORT, *BRIEF, *asked))
    shares = recorded(tmp_path, "sync/adapters_arrived")
    warned = "rounded to bfloat16" in caplog.text
    if engine == "float32":
        assert len(shares) == 3 and min(shares) > 0.98 and not warned
    else:
        assert len(shares) == 3 and max(shares) < 0.5 and warned


def test_adapters_alone_are_applied_in_bfloat16_and_a_sync_is_a_fraction_of_the_weights(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(letters_config(model, tmp_path, *SHORT, *BRIEF, "run.steps=5"))
    applied = recorded(tmp_path, "sync/adapters_applied")
    assert len(applied) == 3 and all(0.8 < share < 1.2 for share in applied)  # steps 1, 2 and 4
    assert recorded(tmp_path, "sync/adapters_arrived") == [] and "rounded" not in caplog.text
    whole = sum(value.nbytes for _, value in iterate_weights(model)) / 2  # the files are float32
    factors = [shape for name, value in iterate_weights(model) if "_proj.weight" in name for shape in value.shape]  # fmt: skip
    sent = 4 + 2 * 4 * sum(factors)
    assert recorded(tmp_path, "sync/mib") == [sent / 2**20] * 5 and sent < whole


def test_a_run_of_adapters_resumes_exports_converts_and_merges(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = digest(iterate_weights(model))
    train(letters_config(model, tmp_path / "whole", *SHORT, "run.steps=3"))
    train(letters_config(model, tmp_path / "cut", *SHORT, "run.steps=1"))
    summary = train(
        letters_config(model, tmp_path / "cut", *SHORT, "run.steps=3", "run.resume=true")
    )
    assert steps(tmp_path / "cut") == steps(tmp_path / "whole")
    assert steps(tmp_path / "cut")[0]["train/kl"] == 0 < steps(tmp_path / "cut")[2]["train/kl"]
    run = tmp_path / "cut" / "letters"
    assert {"export", "adapter"} <= set(summary["written"])
    exported = dict(iterate_weights(run / "export"))
    assert digest(iterate_weights(model)) == before != digest(exported.items())
    with model_directory(run, None, print) as converted:  # its newest checkpoint, of adapters alone
        assert converted.path != run / "export"
        assert digest(iterate_weights(converted.path)) == digest(exported.items())
    assert main(["merge", str(run / "adapter"), str(tmp_path / "merged")]) == 0
    assert "the adapter" in capsys.readouterr().out
    for name, value in iterate_weights(tmp_path / "merged"):
        torch.testing.assert_close(value, exported[name], atol=1e-6, rtol=1e-6)
    config = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (
        4,
        8,
        str(model),
    )
    played = []
    for given in ("adapter", "export"):
        out = tmp_path / f"played-{given}"
        assert main(["eval", "--model", str(run / given), "--out", str(out)]) == 0
        rows = [json.loads(line) for line in (out / "trajectories.jsonl").read_text().splitlines()]
        played.append([[turn["response"] for turn in row["turns"]] for row in rows])
    assert played[0] == played[1]  # greedy: the same tokens
    with pytest.raises(ModelError, match=r"is a LoRA adapter .*rlflow merge"):
        train(letters_config(run / "adapter", tmp_path / "other", *SHORT))
    with (
        pytest.raises(ModelError, match=r"is a LoRA adapter .*rlflow merge"),
        model_directory(run / "adapter", None, print),
    ):
        pass
    assert (
        main(
            [
                "convert",
                "to-hf",
                str(run / "checkpoints" / "step_000003"),
                str(tmp_path / "other"),
                "--hf",
                str(run / "export"),
            ]
        )
        == 7
    )
    assert "adapters of other weights" in capsys.readouterr().err
