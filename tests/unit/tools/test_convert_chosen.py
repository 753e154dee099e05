"""Which checkpoint of several is converted, with which reference, and to where."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from fixtures import tiny_model

from rlflow.models.huggingface import digest, iterate_weights
from rlflow.trainer.base import Trainer
from tools.ckpt_convert.command import main


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """first/, second/: models; run/: a run that began from the second one, with a checkpoint of each; save/: Megatron's."""
    root = tmp_path_factory.mktemp("chosen")
    for step, name in ((5, "first"), (10, "second")):
        model = tiny_model(root / name, seed=step)
        trainer = Trainer.from_pretrained(model)
        trainer.save(root / "run" / "checkpoints" / f"step_{step:06d}" / "trainer", step)
        trainer.close()
        (root / "run" / "checkpoints" / f"step_{step:06d}" / "state.json").write_text("{}")
        shutil.copytree(
            root / "run" / "checkpoints" / f"step_{step:06d}" / "trainer",
            root / "save" / f"iter_{step:07d}",
        )
    (root / "run" / "config.yaml").write_text(f"model: {{path: {root / 'second'}}}\n")
    (root / "save" / "latest_checkpointed_iteration.txt").write_text("10")
    return root


def same(one: Path, other: Path) -> bool:
    return digest(iterate_weights(one)) == digest(iterate_weights(other))


def test_the_iteration_is_taken_whatever_the_tracker_file_says(made: Path, tmp_path: Path) -> None:
    call = ["--hf", str(made / "second")]
    assert main(["to-hf", str(made / "save"), str(tmp_path / "newest"), *call]) == 0
    assert (
        main(["to-hf", str(made / "save"), str(tmp_path / "fifth"), *call, "--iteration", "5"]) == 0
    )
    assert same(tmp_path / "newest", made / "second") and same(tmp_path / "fifth", made / "first")
    assert (
        main(["to-hf", str(made / "save"), str(tmp_path / "none"), *call, "--iteration", "6"]) == 5
    )


def test_a_run_is_its_newest_checkpoint_with_the_model_that_it_began_from(
    made: Path, tmp_path: Path, capsys: Any
) -> None:
    assert main(["to-hf", str(made / "run"), str(tmp_path / "newest")]) == 0
    assert same(tmp_path / "newest", made / "second")
    assert main(["to-hf", str(made / "run"), str(tmp_path / "fifth"), "--iteration", "5"]) == 0
    assert same(tmp_path / "fifth", made / "first")
    assert (
        main(["to-hf", str(made / "run" / "checkpoints" / "step_000005"), str(tmp_path / "step")])
        == 0
    )
    assert same(tmp_path / "step", made / "first")
    capsys.readouterr()
    assert main(["inspect", str(made / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["iteration"] == 10


def test_what_is_missing_is_one_line(made: Path, tmp_path: Path, capsys: Any) -> None:
    for place, words in (
        (made / "save" / "iter_0000005", "pass --hf"),
        (made / "absent", "no such checkpoint directory"),
        (tmp_path / "new", "this run has no checkpoint yet"),
        (tmp_path / "moved", "model.path is no model directory here"),
    ):
        if place.parent == tmp_path:
            (place / "checkpoints").mkdir(parents=True)
            (place / "config.yaml").write_text(f"model: {{path: {tmp_path / 'gone'}}}\n")
        if place.name == "moved":
            shutil.copytree(made / "run" / "checkpoints", place / "checkpoints", dirs_exist_ok=True)
        assert main(["to-hf", str(place), str(tmp_path / "out")]) == 3
        told = capsys.readouterr().err
        assert words in told and told.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("direction", ["to-hf", "to-megatron"])
def test_an_empty_directory_is_taken(made: Path, tmp_path: Path, direction: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    given = [str(made / "run")] if direction == "to-hf" else [str(made / "second")]
    assert main([direction, *given, str(out)]) == 0
    assert any(out.iterdir())
    assert main([direction, *given, str(out)]) == 9, "not empty any more"
