"""The bounds of tests/rounding.py hold, and what computes with fewer digits is far outside them."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from fixtures import tiny_model
from torch import Tensor

from tests import rounding


def in_type(path: Path, rows: list[list[int]], dtype: torch.dtype) -> list[Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype)
    with torch.no_grad():
        return [model(torch.tensor([row])).logits[0].double() for row in rows]


def farthest(found: list[Tensor], exact: list[Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(found, exact, strict=True))


@pytest.mark.parametrize("scale", [0.1, 0.2])
@pytest.mark.parametrize(
    "family", ["qwen2", "qwen3", "llama", "mistral", "qwen3_moe", "deepseek_v3"]
)
def test_float32_is_within_the_bounds_and_bfloat16_far_outside(
    tmp_path: Path, family: str, scale: float
) -> None:
    """About 0.1 of the bound in float32, whatever the family and the size of its weights; 2500 times it in bfloat16."""
    path = tiny_model(tmp_path, family, tokenizer=False, scale=scale)
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 384, (length,), generator=draw).tolist() for length in (300, 60, 20)]
    for kind in (rounding.logits, rounding.logprobs, rounding.cumulative):
        exact, bound = kind(path, rows)
        for dtype, least, most in ((torch.float32, 0.02, 1.0), (torch.bfloat16, 100.0, torch.inf)):
            found = in_type(path, rows, dtype)
            if kind is not rounding.logits:
                found = [one.log_softmax(-1) for one in found]
            if kind is rounding.cumulative:
                found = [one.exp().cumsum(-1) for one in found]
            assert least * bound <= farthest(found, exact) <= most * bound, (kind.__name__, dtype)


def test_sums_in_another_order_differ_by_less_than_what_so_many_roundings_give() -> None:
    draw = torch.Generator().manual_seed(0)
    terms = torch.randn(100, 1000, generator=draw)
    forwards, backwards = (
        functools.reduce(torch.add, terms.T),
        functools.reduce(torch.add, terms.T.flip(0)),
    )
    size = terms.double().norm(dim=-1)
    difference = ((forwards - backwards).abs() / size).max()
    assert 0 < difference <= 2 * rounding.accumulated(1000)
