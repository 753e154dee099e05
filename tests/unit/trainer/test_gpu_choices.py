"""What depends on a GPU is decided in one place each, says so, and is refused where there is none."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.enums import Fp8Recipe
from megatron.core.fp8_utils import get_fp8_align_size

from rlflow.errors import ConfigError
from rlflow.trainer.base import Trainer
from rlflow.trainer.megatron import layers
from rlflow.trainer.megatron.model import FP8_GRANULES, LAYERS, layers_name, uses_transformer_engine
from tests.fixtures import tiny_model
from tests.unit.trainer.backends import BACKENDS

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="what is claimed is the CPU's side"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), tokenizer=False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp8_is_refused_without_transformer_engine(model: Path, backend: str) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.fp8: "):
        Trainer.from_pretrained(model, backend=backend, fp8="delayed")


def test_tokens_come_in_the_multiples_that_megatron_names() -> None:
    recipes = [Fp8Recipe.delayed, Fp8Recipe.tensorwise, Fp8Recipe.blockwise, Fp8Recipe.mxfp8]
    assert {one.value: get_fp8_align_size(one) for one in recipes} | {"none": 1} == FP8_GRANULES


def test_the_layers_are_named_in_the_log(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="rlflow"):
        Trainer.from_pretrained(model).close()
    assert "layers: megatron-core's local layers on the CPU, torch's attention" in caplog.text


@pytest.mark.parametrize("told_of_groups", [True, False])
def test_packed_rows_go_to_torchs_attention_in_the_form_that_it_takes(
    monkeypatch: pytest.MonkeyPatch, told_of_groups: bool
) -> None:
    """That of torch 2.13, and that of 2.11, which has no `enable_gqa`."""
    varlen = pytest.importorskip(
        "torch.nn.attention.varlen", reason="this torch has no attention for variable lengths"
    )
    signature, seen = inspect.signature(varlen.varlen_attn), []
    options = set(signature.parameters) | {"enable_gqa"}
    if not told_of_groups:
        options.discard("enable_gqa")
        signature = signature.replace(
            parameters=[
                signature.parameters[name] for name in signature.parameters if name in options
            ]
        )
    monkeypatch.setattr(layers, "varlen_options", frozenset(options))

    def row_by_row(*arguments: Any, **keywords: Any) -> torch.Tensor:
        given = signature.bind(*arguments, **keywords).arguments
        seen.append(given)
        lengths = given["cu_seq_q"].diff().tolist()
        rows = zip(
            *(given[name].unsqueeze(1).split(lengths) for name in ("query", "key", "value")),
            strict=True,
        )
        return torch.cat([layers._attend(*row) for row in rows]).view(given["query"].shape)

    monkeypatch.setattr(layers, "varlen_attn", row_by_row)
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(7, heads, 8, generator=draw) for heads in (4, 2, 2))
    found = layers._attend_packed(
        query, key, value, torch.tensor([0, 3, 7], dtype=torch.int32), 4, None
    )
    expected = [
        layers._attend(*(part[row].unsqueeze(1) for part in (query, key, value))).squeeze(1)
        for row in (slice(0, 3), slice(3, 7))
    ]
    assert torch.equal(found, torch.cat(expected))
    assert (seen[0]["window_size"], seen[0]["max_q"]) == ((-1, 0), 4)  # causal, as torch says it
    assert seen[0].get("enable_gqa") == (True if told_of_groups else None)


def test_the_local_layers_can_be_asked_for_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(LAYERS, "local")
    assert not uses_transformer_engine() and "local layers" in layers_name()
    monkeypatch.setenv(LAYERS, "flash")
    with pytest.raises(ConfigError, match="RLFLOW_LAYERS: expected auto or local, found 'flash'"):
        uses_transformer_engine()
