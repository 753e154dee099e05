"""The demo's starting policy with experts computes what it computed without, and is trained and sampled."""

from __future__ import annotations

from pathlib import Path

import torch

from recipes.searchr1 import experts
from rlflow.models.architecture import architecture
from rlflow.models.huggingface import check_loadable, iterate_weights, read_config
from rlflow.rollout.embedded.decoder import Decoder
from tests import rounding


def test_a_model_with_experts_computes_what_it_did_without(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    experts.write(experts.DENSE, tmp_path / "moe")
    check_loadable(tmp_path / "moe")
    row = torch.randint(3, 1500, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    (exact,), bound = rounding.logits(experts.DENSE, [row])
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "moe", dtype=torch.float64, experts_implementation="eager"
    )
    with torch.no_grad():
        found = model(torch.tensor([row])).logits[0]
    assert (found - exact).abs().max() <= bound
    decoder = Decoder(
        architecture(read_config(tmp_path / "moe")), torch.float32, torch.device("cpu")
    )
    decoder.load(iterate_weights(tmp_path / "moe"))
    assert 1e6 <= sum(parameter.numel() for parameter in decoder.parameters.values()) <= 1.5e6
