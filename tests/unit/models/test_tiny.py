"""A tiny model of every family that can be started from is one that can be trained and sampled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlflow.errors import ConfigError
from rlflow.models.architecture import architecture
from rlflow.models.huggingface import check_loadable, iterate_weights, read_config
from rlflow.models.tiny import tiny_families, write_random_model, write_tokenizer
from rlflow.rollout.embedded.decoder import Decoder

TEXTS = ["Where was Orvan Telmik born? In Vasmere, on the river Ilda."] * 3


@pytest.mark.parametrize("family", tiny_families())
def test_tiny_models_of_all_families_load(family: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, TEXTS, vocabulary=300)
    write_random_model(tmp_path, family=family, hidden=64, layers=2, ffn=96)
    check_loadable(tmp_path)
    model = architecture(read_config(tmp_path))
    assert model.family == family and model.value_dim == 16
    if model.experts is not None:
        assert (model.experts.count, model.experts.top_k, model.experts.ffn) == (8, 2, 48)
    Decoder(model, torch.float32, torch.device("cpu")).load(iterate_weights(tmp_path))


def test_an_unknown_family_is_told_which_there_are(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="glm4_moe, mixtral, qwen2, qwen2_moe, qwen3_moe, found 'qwen3-moe'"
    ):
        write_random_model(tmp_path, family="qwen3-moe")
