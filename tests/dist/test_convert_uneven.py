"""Pipelines with fewer layers at the ends, and more tensor-parallel ranks than key-value groups: megatron-core's own ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import tiny_model
from rlflow_tools.ckpt_convert.export_model import Options, to_huggingface
from rlflow_tools.ckpt_convert.import_model import to_megatron
from rlflow_tools.ckpt_convert.mapping.layout import CheckpointLayout

from rlflow.models.huggingface import digest, iterate_weights, read_config
from tests.dist.checkpoint_ranks import Job, launch

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(900)]

VOCAB = 101
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"tensor": 4},
    {"pipeline": 2, "first_layers": 1},
    {"pipeline": 3, "first_layers": 1, "last_layers": 2},
    {"pipeline": 2, "virtual": 2, "last_layers": 2},
)


@pytest.mark.parametrize("direction", ["to-hf", "to-megatron"])
def test_layouts_that_divide_nothing_evenly(direction: str, tmp_path: Path) -> None:
    sizes = {
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
    }
    reference = tiny_model(tmp_path / "hf", "qwen2", tokenizer=False, **sizes)
    config = read_config(reference)
    plain = Job(config, tmp_path / "plain.pt", VOCAB, save_to=tmp_path / "plain")
    saved = [
        Job(config, tmp_path / f"{number}.pt", VOCAB, save_to=tmp_path / str(number), **layout)
        for number, layout in enumerate(LAYOUTS)
    ]
    launch([plain, *(saved if direction == "to-hf" else [])], limit_s=600)
    to_huggingface(
        tmp_path / "plain" / "torch_dist", tmp_path / "model", reference, Options(verify="full")
    )
    if direction == "to-hf":
        for number in range(len(LAYOUTS)):
            for kind in ("torch_dist", "torch"):
                to_huggingface(
                    tmp_path / str(number) / kind, tmp_path / f"{number}-{kind}", reference
                )
                found = digest(iterate_weights(tmp_path / f"{number}-{kind}"))
                assert found == digest(iterate_weights(tmp_path / "model")), (LAYOUTS[number], kind)
        return
    jobs = []
    for number, layout in enumerate(LAYOUTS):
        out = tmp_path / f"{number}-megatron"
        cut = CheckpointLayout(**layout, vocab_multiple=1, fused=False)
        to_megatron(tmp_path / "model", out, Options(layout=cut, verify="full"))
        result = tmp_path / f"{number}.pt"
        jobs.append(Job(config, result, VOCAB, load_from=out / "release", **layout))
    launch(jobs, limit_s=600)
    wrong = {str(job.load_from): torch.load(job.result)["wrong"] for job in jobs}
    assert not any(wrong.values()), wrong
