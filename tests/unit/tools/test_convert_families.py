"""Genuine megatron-core models of every family, converted in both directions and compared with transformers.

Their weights are drawn by megatron-core's own description of tensors, so nothing here depends on the mapping tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import tiny_model
from rlflow_tools.ckpt_convert.export_model import Options, to_huggingface
from rlflow_tools.ckpt_convert.import_model import to_megatron
from rlflow_tools.ckpt_convert.mapping.layout import CheckpointLayout
from rlflow_tools.ckpt_convert.writers import torch_dist

from rlflow.models.families import FAMILIES
from rlflow.models.huggingface import digest, iterate_weights, read_config
from tests.dist.checkpoint_ranks import ITERATION, TOKENS, Job, run_alone

VOCAB = 101
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mistral, tied, padded": ("mistral", {"tied": True}, {"options": {"vocab_multiple": 16}}),
    "qwen2, bias, bfloat16": ("qwen2", {}, {"dtype": torch.bfloat16}),
    "qwen3, head_dim, numbered keys": ("qwen3", {}, {"numbered": True}),
    "llama, TE names": ("llama", {}, {"fused": True}),
    "mixtral": ("mixtral", {}, {}),
    "qwen2_moe, halves of fc1 apart": (
        "qwen2_moe",
        {},
        {"options": {"metadata": {"singleton_local_shards": True}}},
    ),
    "qwen3_moe, TE names": ("qwen3_moe", {}, {"fused": True}),
    "qwen3_moe, every second layer": ("qwen3_moe", {"decoder_sparse_step": 2}, {}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "glm4_moe": ("glm4_moe", {}, {}),
    "glm4_moe, neither bias nor norm, TE names": (
        "glm4_moe",
        {"attention_bias": False, "use_qk_norm": False},
        {"fused": True},
    ),
    "deepseek_v2": ("deepseek_v2", {}, {}),
    "deepseek_v3, TE names": ("deepseek_v3", {}, {"fused": True}),
}
NAMED = {family for family, _, _ in CASES.values()}
CASES |= {family: (family, {}, {}) for family in FAMILIES if family not in NAMED}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Job]]:
    """Per case: the reference directory, and the job that saved the checkpoint in both formats."""
    root = tmp_path_factory.mktemp("families")
    found = {}
    for number, (name, (family, sizes, options)) in enumerate(CASES.items()):
        reference = tiny_model(
            root / str(number) / "hf", family, tokenizer=False, vocab_size=VOCAB, **sizes
        )
        place = root / str(number)
        job = Job(
            read_config(reference), place / "result.pt", VOCAB, save_to=place / "saved", **options
        )
        found[name] = reference, job
    run_alone([job for _, job in found.values()])
    return found


def logits(path: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(TOKENS).logits


@pytest.mark.parametrize("name", CASES)
def test_export_computes_what_megatron_computes(
    name: str, made: dict[str, tuple[Path, Job]], tmp_path: Path
) -> None:
    reference, job = made[name]
    assert job.save_to is not None
    for saved in ("torch_dist", "torch"):
        manifest = to_huggingface(
            job.save_to / saved, tmp_path / saved, reference, Options(verify="full")
        )
        assert (
            manifest["source"]["iteration"] == ITERATION and manifest["source"]["format"] == saved
        )
    content = {
        saved: digest(iterate_weights(tmp_path / saved)) for saved in ("torch_dist", "torch")
    }
    assert content["torch_dist"] == content["torch"], "the formats give other weights"
    expected = torch.load(job.result)["logits"]
    bound = 1e-5 if job.dtype is torch.float32 else 0.05  # bfloat16: Megatron rounds every product
    assert (logits(tmp_path / "torch") - expected).abs().max() <= bound


def test_import_loads_in_megatron_with_the_same_parameters(
    made: dict[str, tuple[Path, Job]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By megatron-core's own model and `dist_checkpointing.load`, of every family of the tables."""
    monkeypatch.setattr(torch_dist, "CHUNK_BYTES", 10_000)  # most matrices in several chunks
    jobs = []
    for number, name in enumerate(CASES):
        reference, job = made[name]
        assert job.save_to is not None
        model, out = tmp_path / f"{number}-hf", tmp_path / f"{number}-megatron"
        to_huggingface(job.save_to / "torch", model, reference, Options(verify="none"))
        # Cut for other ranks than those that load it.
        layout = CheckpointLayout(tensor=2, vocab_multiple=8, fused=False)
        to_megatron(model, out, Options(layout=layout, verify="full"))
        rows = {"vocab_multiple": layout.vocab_multiple}
        result, loads = tmp_path / f"{number}.pt", out / "release"
        jobs.append(Job(job.config, result, VOCAB, load_from=loads, dtype=job.dtype, options=rows))
    assert {job.config["model_type"] for job in jobs} == FAMILIES.keys(), "a family is not loaded"
    run_alone(jobs)
    assert {job.load_from: torch.load(job.result)["wrong"] for job in jobs} == {
        job.load_from: [] for job in jobs
    }
