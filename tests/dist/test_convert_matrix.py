"""Checkpoints of genuine megatron-core models in many layouts: exported, loaded by transformers, and brought back.

Weights follow from megatron-core's own description of tensors (checkpoint_ranks.py), the same in every layout, so that all
exports of a model must be the same bytes, and every import must be what `expected` says."""

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
from tests import rounding
from tests.dist.checkpoint_ranks import TOKENS, Job, launch

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1500)]

VOCAB = 101  # odd, so that every cut pads it
GROUPED = {"num_attention_heads": 8, "num_key_value_heads": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-tied": ("qwen2", {"tied": True, **GROUPED}),
    "qwen2": ("qwen2", GROUPED),
    "qwen3": ("qwen3", GROUPED),
    "llama": ("llama", GROUPED),
    "qwen3_moe": ("qwen3_moe", GROUPED),
    "qwen2_moe": ("qwen2_moe", GROUPED),
    "deepseek_v3": ("deepseek_v3", {}),
}
DENSE: tuple[dict[str, Any], ...] = (
    {},
    {"tensor": 2, "options": {"vocab_multiple": 16}},
    {"pipeline": 2, "numbered": True},
    {"pipeline": 2, "virtual": 2, "fused": True},
    {"tensor": 2, "pipeline": 2, "fused": True},
    {"tensor": 2, "pipeline": 2, "virtual": 2},
    {"tensor": 4, "args": False},
)
WIDEST = {"tensor": 4, "pipeline": 2}  # eight processes: of one model only
SPARSE: tuple[dict[str, Any], ...] = (
    {},
    {"expert": 2},
    {"tensor": 2, "pipeline": 2, "virtual": 2},
    {"tensor": 2, "expert": 2},
    {"tensor": 2, "expert": 2, "expert_tensor": 1},
    {"pipeline": 2, "expert": 2},
)
BACK = (  # (layout that torch_dist is cut for, layout that loads it)
    (CheckpointLayout(1, 1, vocab_multiple=8, fused=False), {"tensor": 2, "pipeline": 2}),
    (CheckpointLayout(4, 2, vocab_multiple=2, fused=False), {"pipeline": 2, "virtual": 2}),
    (CheckpointLayout(2, 1, vocab_multiple=4, fused=False), {"tensor": 1}),
)


def layouts(name: str) -> tuple[dict[str, Any], ...]:
    """Of a model: all of its kind for the first of each kind, every second for the others."""
    if name == "qwen2-tied":
        return (*DENSE, WIDEST)
    if name == "qwen3_moe":
        return SPARSE
    return (SPARSE if "moe" in name or "deepseek" in name else DENSE)[::2]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Job]]:
    """Per model: the jobs that saved it, one per layout, in both formats; the reference is hf/ in their directory."""
    root = tmp_path_factory.mktemp("matrix")
    found: dict[str, list[Job]] = {}
    for name, (family, sizes) in MODELS.items():
        place = root / name
        reference = tiny_model(
            place / "hf", family, tokenizer=False, vocab_size=VOCAB, num_hidden_layers=4, **sizes
        )
        found[name] = [
            Job(
                read_config(reference),
                place / f"{number}.pt",
                VOCAB,
                save_to=place / f"saved-{number}",
                **layout,
            )
            for number, layout in enumerate(layouts(name))
        ]
    launch([job for jobs in found.values() for job in jobs], limit_s=1200)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_every_layout_and_format_gives_the_same_weights_and_megatrons_logits(
    name: str, made: dict[str, list[Job]], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    digests = set()
    for number, job in enumerate(made[name]):
        assert job.save_to is not None
        for saved in ("torch_dist", "torch"):
            out = tmp_path / f"{number}-{saved}"
            to_huggingface(
                job.save_to / saved, out, job.result.parent / "hf", Options(verify="full")
            )
            digests.add(digest(iterate_weights(out)))
        with torch.no_grad():
            found = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)(TOKENS).logits
        difference = (found - torch.load(job.result)["logits"]).abs().max().item()
        _, bound = rounding.logits(job.result.parent / "hf", TOKENS.tolist())  # of each side
        assert difference <= 2 * bound, layouts(name)[number]
    assert len(digests) == 1


def test_imports_load_in_megatron_at_other_layouts(
    made: dict[str, list[Job]], tmp_path: Path
) -> None:
    jobs = []
    for name, (family, _) in MODELS.items():
        job = made[name][0]
        assert job.save_to is not None
        model = tmp_path / f"{name}-hf"
        to_huggingface(
            job.save_to / "torch_dist", model, job.result.parent / "hf", Options(verify="none")
        )
        for number, (layout, loads) in enumerate(BACK):
            if family == "deepseek_v3" and layout.tensor == 4:
                continue  # 4 latent ranks do not divide its compressed keys
            place = tmp_path / f"{name}-{number}"
            if family == "qwen3_moe":
                loads = {**loads, "expert": 2}
            to_megatron(model, place, Options(layout=layout, verify="full"))
            rows = {"options": {"vocab_multiple": layout.vocab_multiple}}
            result = tmp_path / f"{name}-{number}.pt"
            jobs.append(
                Job(job.config, result, VOCAB, load_from=place / "release", **loads, **rows)
            )
    launch(jobs, limit_s=1200)
    assert {
        str(job.load_from): torch.load(job.result)["wrong"]
        for job in jobs
        if torch.load(job.result)["wrong"]
    } == {}
