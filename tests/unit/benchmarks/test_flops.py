"""FLOPs: against a sum by hand, and against what torch counts in transformers' model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))  # scripts, no package

from common import SHAPES, qwen2
from flops import forward_flops, peak_flops, training_flops

SMALL = qwen2(hidden=4, layers=1, heads=2, groups=1, ffn=3, vocab=5)


def test_forward_flops_of_two_tokens_are_those_counted_by_hand() -> None:
    # Heads of 2 dimensions. Weights per layer: q 4x4, k and v 4x2 each, o 4x4, three of 4x3: 16 + 16 + 16 + 36 = 84.
    linear = 2 * 84 * 2  # two tokens
    attention = 3 * (2 * 2 * 2 + 2 * 2 * 2)  # 3 pairs, 2 heads of 2 dimensions, in q.k and in p.v
    output = 2 * 4 * 5  # one scored token
    assert forward_flops(SMALL, [2], scored=1) == linear + attention + output == 424


def test_training_flops_are_three_forward_passes() -> None:
    assert training_flops(SMALL, [2], scored=1) == 3 * 424


def test_packed_rows_attend_within_themselves_only() -> None:
    apart = forward_flops(SMALL, [3, 5], scored=0)
    assert apart == forward_flops(SMALL, [3], scored=0) + forward_flops(SMALL, [5], scored=0)
    assert (
        forward_flops(SMALL, [8], scored=0) - apart == 3 * 5 * 4 * 2 * 2
    )  # the 15 pairs across the two rows


def test_matrix_products_are_those_that_torch_counts_in_transformers() -> None:
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = SHAPES["tiny"]
    config = Qwen2Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.groups,
        attn_implementation="eager",
    )
    model = Qwen2ForCausalLM(config)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 16, dtype=torch.int64), use_cache=False)
    unseen = (
        16 * 15 // 2 * 4 * shape.layers * shape.hidden
    )  # eager attention computes pairs that the mask hides
    assert counter.get_total_flops() == forward_flops(shape, [16], scored=16) + unseen


def test_a_qwen_3b_shape_has_the_published_number_of_weights() -> None:
    # https://huggingface.co/Qwen/Qwen2.5-3B: 2.77B parameters without the embedding.
    shape = SHAPES["3B"]
    weights = forward_flops(shape, [1], scored=0) // 2
    assert weights == pytest.approx(2.77e9, rel=5e-3)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA L40S", 362e12),
        ("Other", None),
    ],
)
def test_peak_is_that_of_the_longest_matching_name(name: str, expected: float | None) -> None:
    assert peak_flops(name) == expected
