"""What `rlflow eval --model` takes: a model directory, a run, or a checkpoint, which is converted once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from fixtures import tiny_model

from rlflow.config.loading import save_config
from rlflow.config.schema import load_config
from rlflow.errors import ConfigError, ConversionError
from rlflow.models.huggingface import digest, iterate_weights
from rlflow.run.origin import ModelDirectory, mark_own, model_directory
from rlflow.trainer.base import Trainer


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`run` with two checkpoints that were saved of the model `start`."""
    root = tmp_path_factory.mktemp("models")
    model = tiny_model(root / "start", family="qwen3", tokenizer=True)
    trainer = Trainer.from_pretrained(model)
    for step in (1, 2):
        trainer.save(root / "run" / "checkpoints" / f"step_{step:06d}" / "trainer", step)
        (root / "run" / "checkpoints" / f"step_{step:06d}" / "state.json").write_text(
            json.dumps({"step": step})
        )
    trainer.close()
    save_config(load_config(None, [f"model.path={model}"]), root / "run" / "config.yaml")
    mark_own(root / "run" / "config.yaml")
    return root


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made / "run", tmp_path / "run")
    return tmp_path / "run"


def resolve(given: Path, reference: Path | None = None) -> tuple[ModelDirectory, list[str]]:
    said: list[str] = []
    with model_directory(given, reference, said.append) as model:
        return model, said


def test_a_run_is_its_newest_checkpoint_and_is_converted_once(made: Path, run: Path) -> None:
    model, said = resolve(run)
    assert (
        model.path == run / "checkpoints" / "step_000002.hf" and model.config == run / "config.yaml"
    )
    assert model.name == "run-step_000002" and "converting to" in said[0]
    assert digest(iterate_weights(model.path)) == digest(iterate_weights(made / "start"))
    assert "already converted" in resolve(run / "checkpoints" / "step_000002" / "trainer")[1][0]
    assert resolve(run / "checkpoints" / "step_000001")[0].path.name == "step_000001.hf"


@pytest.mark.parametrize("what", ["checkpoint", "reference", "conversion"])
def test_a_conversion_of_something_else_is_never_used(
    made: Path, run: Path, tmp_path: Path, what: str
) -> None:
    """A stale cache that returns old weights is the failure to prevent: whatever changed, it is converted again."""
    shutil.copytree(made / "start", tmp_path / "start")
    step = run / "checkpoints" / "step_000002"
    model, _ = resolve(step, tmp_path / "start")
    if what == "checkpoint":
        shutil.rmtree(step)
        shutil.copytree(run / "checkpoints" / "step_000001", step)
    elif what == "reference":
        (tmp_path / "start" / "generation_config.json").write_text('{"max_length": 9}')
    else:
        file = model.path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-2] + b"ab")
    assert "converting to" in resolve(step, tmp_path / "start")[1][0]
    assert "already converted" in resolve(step, tmp_path / "start")[1][0]


def test_a_checkpoint_of_no_run_needs_a_reference(made: Path, run: Path, tmp_path: Path) -> None:
    lone = tmp_path / "lone"
    shutil.copytree(run / "checkpoints" / "step_000001" / "trainer", lone)
    with pytest.raises(ConfigError, match="pass --hf with the model directory"):
        resolve(lone)
    model, _ = resolve(lone, made / "start")
    assert model == ModelDirectory(tmp_path / "lone.hf", "lone", None)


def test_what_is_no_model_is_named(made: Path, tmp_path: Path) -> None:
    told = (
        "no such directory; expected a model directory, a run, a checkpoint, or a name on the hub"
    )
    with pytest.raises(ConfigError, match=told):
        resolve(tmp_path / "absent")
    with pytest.raises(ConversionError, match="no checkpoint"):
        resolve(tmp_path)
    save_config(load_config(None, []), tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match="no checkpoint and no export yet"):
        resolve(tmp_path)
    shutil.copytree(made / "start", tmp_path / "export")
    assert resolve(tmp_path)[0].path == tmp_path / "export"
