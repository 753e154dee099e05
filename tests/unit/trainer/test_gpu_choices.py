"""What depends on a GPU is decided in one place each, says so, and is refused where there is none."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from rlflow.errors import ConfigError
from rlflow.trainer.base import Trainer
from rlflow.trainer.megatron.model import LAYERS, layers_name, uses_transformer_engine
from tests.fixtures import tiny_model

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="what is claimed is the CPU's side")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), tokenizer=False)


@pytest.mark.parametrize("backend", ["megatron", "reference"])
def test_fp8_is_refused_without_transformer_engine(model: Path, backend: str) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.fp8: "):
        Trainer.from_pretrained(model, backend=backend, fp8="delayed")


def test_the_layers_are_named_in_the_log(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="rlflow"):
        Trainer.from_pretrained(model).close()
    assert "layers: megatron-core's local layers on the CPU, torch's attention" in caplog.text


def test_the_local_layers_can_be_asked_for_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAYERS, "local")
    assert not uses_transformer_engine() and "local layers" in layers_name()
    monkeypatch.setenv(LAYERS, "flash")
    with pytest.raises(ConfigError, match="RLFLOW_LAYERS: expected auto or local, found 'flash'"):
        uses_transformer_engine()
