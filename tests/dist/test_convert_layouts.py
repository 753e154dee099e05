"""Checkpoints of four real ranks become the weights that the ranks had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import tiny_model
from rlflow_tools.ckpt_convert.export_model import Options, to_huggingface

from rlflow.models.huggingface import digest, iterate_weights
from tests.dist.megatron_ranks import Ranks, make_batch

pytestmark = [pytest.mark.dist, pytest.mark.slow]

VOCAB = 301  # odd, so that two tensor ranks pad it
MODELS: dict[str, dict[str, Any]] = {
    "qwen2-tied": {"family": "qwen2", "tied": True},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3"},
    "llama": {"family": "llama"},
}
LAYOUTS = (  # (tensor, pipeline, options); the rest of the four ranks is data parallel
    (2, 2, {}),
    (2, 1, {"distributed_optimizer": True}),
    (1, 2, {"distributed_optimizer": True}),
)


def test_trained_checkpoints_of_every_layout_convert_bit_for_bit(
    tmp_path: Path, ranks: Ranks
) -> None:
    jobs = []
    for name, options in MODELS.items():
        tiny_model(
            tmp_path / name,
            tokenizer=False,
            vocab_size=VOCAB,
            num_hidden_layers=4,
            scale=0.15,
            **options,
        )
        for tensor, pipeline, how in LAYOUTS:
            place = f"{name}-{tensor}-{pipeline}"
            jobs.append(
                {
                    "model": tmp_path / name,
                    "batch": make_batch(VOCAB),
                    "tensor_parallel": tensor,
                    "pipeline_parallel": pipeline,
                    "options": how,
                    "save_to": tmp_path / f"checkpoint-{place}",
                    "result": tmp_path / f"{place}.pt",
                }
            )
    ranks.run(tmp_path, jobs, limit_s=280)
    for job in jobs:
        trained = torch.load(job["result"], weights_only=False)["weights"]
        out = tmp_path / f"out-{job['result'].stem}"
        to_huggingface(job["save_to"], out, job["model"], Options(verify="full"))
        assert digest(iterate_weights(out)) == digest(trained.items()), job["result"].stem
        assert digest(iterate_weights(out)) != digest(iterate_weights(job["model"])), (
            "the base's weights"
        )
