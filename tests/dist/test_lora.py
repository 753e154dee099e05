"""Adapters compute in every layout what LoRA written out in torch computes; four real ranks over gloo.

Cases are those of test_layouts, which has the fast ones: a model and words, what of the four ranks is left is data parallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import tiny_model

from rlflow.models.adapter import write_adapter
from rlflow.trainer.options import LoraOptions
from tests.dist.lora_ranks import ALPHA, LORA, RANK, VOCAB, check_layout, make_job, train_alone
from tests.dist.megatron_ranks import Ranks
from tests.dist.test_layouts import options_of

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1500)]

MODELS: dict[str, dict[str, Any]] = {
    "qwen2-tied": {"family": "qwen2", "tied": True},
    "qwen3": {"family": "qwen3"},
}
CASES = [
    f"{model} {layout}".strip()
    for model in MODELS
    for layout in (
        "", "TP2", "PP2", "CP2", "TP2 SP", "PP2 VPP2", "TP2 PP2", "TP2 PP2 packed full", "TP2 CP2 SP packed DO full",
        "PP2 VPP2 CP2 DO", "CP4 packed", "PP4 selective", "TP2 PP2 VPP2 SP selective",
    )
]  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lora")
    for name, options in MODELS.items():
        tiny_model(
            path / name,
            tokenizer=False,
            vocab_size=VOCAB,
            num_hidden_layers=4,
            scale=0.15,
            **options,
        )
    return path


@pytest.fixture(scope="module")
def single(directory: Path) -> dict[str, Any]:
    return {name: train_alone(directory, name) for name in MODELS}


@pytest.fixture(scope="module")
def jobs(directory: Path, single: Any, ranks: Ranks) -> dict[str, dict[str, Any]]:
    made = {case: make_job(directory, case.split()[0], case, options_of(case)) for case in CASES}
    ranks.run(directory, list(made.values()), limit_s=1400)
    return made


@pytest.mark.parametrize("layout", ["TP2", "PP2"])
def test_peft_loads_what_ranks_export_with_the_same_logits(
    layout: str, directory: Path, jobs: Any
) -> None:
    """The package itself, where it is installed: log-probs of its model and of the ranks' policy, and its merged weights."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from transformers import AutoModelForCausalLM

    job = jobs[f"qwen3 {layout}"]
    found, base = torch.load(job["result"], weights_only=False), job["model"]
    targets = LoraOptions(**LORA).targets
    adapter = directory / f"adapter-{layout}"
    write_adapter(
        adapter, found["adapters"].items(), base=base, rank=RANK, alpha=ALPHA, targets=targets
    )
    model = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter
    )
    batch = job["batch"]
    with torch.no_grad():
        logits = model.eval()(batch.tokens).logits[:, :-1] / batch.temperatures[:, None, None]
    chosen = logits.log_softmax(-1).gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
    valid = torch.arange(1, batch.tokens.shape[1]) < batch.lengths[:, None]
    assert (found["after"] - found["score"]).abs().max() > 1e-2, "the adapters have learned nothing"
    torch.testing.assert_close(found["after"][:, 1:], chosen * valid, atol=5e-5, rtol=0)
    merged = model.merge_and_unload().state_dict()
    for name, value in found["weights"].items():
        torch.testing.assert_close(merged[name], value, atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_every_layout_of_adapters_is_one_plain_lora(case: str, jobs: Any, single: Any) -> None:
    check_layout(jobs[case], *single[case.split()[0]])
