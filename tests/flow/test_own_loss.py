"""A loss of one's own, named as a user names it: `file.py:Name` in `rlflow train`, from the directory that holds it."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from rlflow.commands.cli import main
from tests.flow.letters import letters_config, write_config, write_letters_model
from tests.reference import ORACLE

SOURCE = """
from dataclasses import dataclass

from rlflow.algorithms.losses.policy_gradient import ReinforceLoss
from rlflow.types import Batch, LossResult, PolicyOutput


@dataclass(frozen=True)
class Scaled(ReinforceLoss):
    scale: float = 1.0

    def kernel(self, output: PolicyOutput, batch: Batch) -> LossResult:
        loss, metrics = super().kernel(output, batch)
        return self.scale * loss, {**metrics, "scale": loss.detach() * 0 + self.scale}
"""


def test_a_loss_in_a_file_is_what_is_trained_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At scale 1 the weights are those of the built-in loss, bit for bit; at scale 0 they stay what they were."""
    from rlflow.report.sinks import read_metrics

    (tmp_path / "my_loss.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    model = write_letters_model(tmp_path / "model")
    values = ("run.steps=1", "run.deterministic=true", f"trainer.backend={ORACLE}", "evaluation.questions=2",
              "evaluation.final_questions=2", "metrics.picture=false")  # fmt: skip
    config = write_config(letters_config(model, tmp_path, *values), tmp_path / "run.yaml")

    def trained(name: str, *losses: str) -> dict[str, Tensor]:
        assert main(["train", "--config", str(config), f"run.name={name}", *losses]) == 0, (
            capsys.readouterr().err
        )
        return load_file(tmp_path / name / "export" / "model.safetensors")

    start = load_file(model / "model.safetensors")
    built_in = trained("built_in", "algorithm.losses=[reinforce]")
    named = trained("named", "algorithm.losses=[my_loss.py:Scaled]")
    off = trained("off", "algorithm.losses=[{name: my_loss.py:Scaled, scale: 0}]")
    assert built_in.keys() == named.keys() == off.keys() == start.keys()
    assert any(not built_in[key].equal(start[key]) for key in start)
    assert all(named[key].equal(built_in[key]) and off[key].equal(start[key]) for key in start)
    assert read_metrics(tmp_path / "off" / "metrics.jsonl")[-1]["train/scale"] == 0.0
    capsys.readouterr()
    assert main(["train", "--config", str(config), "algorithm.losses=[my_loss.py:Scald]"]) == 2
    assert "my_loss.py has no 'Scald'. Did you mean 'Scaled'?" in capsys.readouterr().err
