"""Checkpoints that other versions of megatron-core wrote, with their own default strategy, are their models bit for bit.

RLFLOW_MEGATRON_PATHS: directories of other versions, separated by colons, each made by `pip install --no-deps --target DIR
megatron-core==VERSION`; without it only the installed version writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fixtures import tiny_model
from rlflow_tools.ckpt_convert.export_model import Options, to_huggingface
from rlflow_tools.ckpt_convert.readers.formats import open_source

from rlflow.models.architecture import placed_rules, stored_architecture
from rlflow.models.huggingface import iterate_weights, read_config
from rlflow.models.sharding import merge

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WRITER = Path(__file__).parent / "core_writer.py"
PATHS = [None, *filter(None, os.environ.get("RLFLOW_MEGATRON_PATHS", "").split(":"))]


@pytest.mark.parametrize("common", ["own", "object"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize("path", PATHS, ids=lambda path: Path(path).name if path else "installed")
def test_what_a_version_wrote_is_its_model(
    path: str | None, family: str, common: str, tmp_path: Path
) -> None:
    reference = tiny_model(
        tmp_path / "hf", family, tokenizer=False, vocab_size=101, tied=family == "qwen2"
    )
    command = [
        sys.executable,
        str(WRITER),
        str(reference / "config.json"),
        str(tmp_path / "saved"),
        common,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path or ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    step = tmp_path / "saved" / "iter_0000007"
    assert common == "own" or not (step / "common.pt").exists()
    manifest = to_huggingface(step, tmp_path / "out", reference, Options(verify="full"))
    assert manifest["source"]["iteration"] == 7 and open_source(step).arguments["num_layers"] == 2
    model = stored_architecture(read_config(reference))
    saved, found = (
        torch.load(tmp_path / "saved" / "weights.pt"),
        dict(iterate_weights(tmp_path / "out")),
    )
    for rule, layer in placed_rules(model):
        parts = merge(rule, [saved.pop(rule.megatron_name(layer, rule.expert or 0))], model)
        for name, part in zip(rule.names(layer), parts):
            assert torch.equal(found.pop(name), part), name
    assert not saved and not found
