"""Saves of RLinf, slime, verl and NeMo-RL, by real ranks over gloo, are their models bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import tiny_model
from rlflow_tools.ckpt_convert.export_model import Options, to_huggingface
from rlflow_tools.ckpt_convert.readers.formats import open_source

from rlflow.models.architecture import placed_rules, stored_architecture
from rlflow.models.huggingface import digest, iterate_weights, read_config
from rlflow.models.sharding import merge
from tests.dist.checkpoint_ranks import Job, launch
from tests.dist.program_saves import folder

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(900)]

VOCAB = 101
GROUPED = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4}
DENSE: tuple[dict[str, Any], ...] = ({}, {"tensor": 2, "pipeline": 2}, {"pipeline": 2, "data": 2})
SPARSE: tuple[dict[str, Any], ...] = ({}, {"tensor": 2, "expert": 2}, {"pipeline": 2, "expert": 2})
PROGRAMS = {
    "rlinf": {"fused": True, "options": {"vocab_multiple": 1}},
    "slime": {"options": {"vocab_multiple": 16}},
    "verl": {"options": {"vocab_multiple": 1}},
    "nemo_rl": {"options": {"vocab_multiple": 16}},
}
STEPS = {"rlinf": 7, "slime": 7, "verl": 8, "nemo_rl": 57}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_saves_of_other_programs_are_their_models(family: str, tmp_path: Path) -> None:
    pytest.importorskip(
        "omegaconf", reason="RLinf's arguments are of OmegaConf: pip install omegaconf"
    )
    reference = tiny_model(tmp_path / "hf", family, tokenizer=False, vocab_size=VOCAB, **GROUPED)
    config = read_config(reference)
    jobs = [
        Job(
            config,
            tmp_path / f"{program}-{number}.pt",
            VOCAB,
            dtype=torch.bfloat16,
            save_to=tmp_path / f"saved-{program}-{number}",
            program=program,
            **options,
            **layout,
        )
        for program, options in PROGRAMS.items()
        for number, layout in enumerate(SPARSE if "moe" in family else DENSE)
    ]
    launch(jobs, limit_s=600)
    digests = {}
    for job in jobs:
        out = tmp_path / f"out-{job.result.stem}"
        to_huggingface(folder(job), out, reference, Options(verify="full"))
        digests[job.result.stem] = digest(iterate_weights(out))
        assert open_source(folder(job)).iteration == STEPS[job.program]
    assert len(set(digests.values())) == 1, digests
    _check_against_the_rank(jobs[0], tmp_path / "out-rlinf-0", config)


def _check_against_the_rank(job: Job, out: Path, config: dict[str, Any]) -> None:
    """The weights of a model on one rank, put together by the trainer's rules."""
    (state,) = torch.load(job.result)["weights"]
    saved = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    model = stored_architecture(config)
    exported = dict(iterate_weights(out))
    for rule, layer in placed_rules(model):
        parts = merge(rule, [saved.pop(rule.megatron_name(layer, rule.expert or 0))], model)
        for name, part in zip(rule.names(layer), parts):
            assert torch.equal(exported.pop(name), part), name
    assert not saved and not exported
